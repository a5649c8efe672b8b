// SPDX-License-Identifier: Apache-2.0
#include "engine/allreduce_call.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "common/error.hpp"

namespace keras_hpc {
namespace {

size_t at(int i) {
  return static_cast<size_t>(i);
}

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
size_t rounded(size_t nbytes, size_t unit) {
  return (nbytes + unit - 1) / unit * unit;
}

// Looks at what other ranks have done, before the first one at the clock.
constexpr int kGlances = 64;
// Up to this many nodes, each sends what it has to all others at once.
constexpr int kFewNodes = 8;
constexpr size_t kPostBytes = kLine + AllreduceCall::kSlotBytes;
constexpr int kDataTag = 1;
constexpr int kWordTag = 2;
constexpr size_t kMessageBytes = sizeof(int64_t) + AllreduceCall::kSlotBytes;

// What a rank asks for as one number: equal on all ranks, or it is an error.
int64_t make_signature(Path path, DType dtype, Op op, size_t count) {
  return static_cast<int64_t>(count << 8) | (static_cast<int64_t>(path) << 5) | (static_cast<int64_t>(dtype) << 2) |
         static_cast<int64_t>(op);
}
// What the first rank of a node tells the others if the ranks of its own node disagree.
constexpr int64_t kDisagreement = -1;

std::string describe(int64_t signature) {
  if (signature == kDisagreement) return "result of ranks that disagree themselves";
  const auto path = static_cast<Path>((signature >> 5) & 7);
  const auto dtype = static_cast<DType>((signature >> 2) & 7);
  const auto op = static_cast<Op>(signature & 3);
  return std::string(name_of(op)) + " of " + std::to_string(signature >> 8) + " x " + name_of(dtype) +
         (path == Path::push ? " in memory of keras_hpc.empty" : "");
}
std::string disagreement(int me, int64_t mine, const std::string& other, int64_t theirs) {
  return "Ranks disagree on what to reduce: rank " + std::to_string(me) + " asks for the " + describe(mine) + ", " +
         other + " for the " + describe(theirs) + ".";
}

// Calls a function at the end of a scope, also when an exception ends it.
template <class F>
struct AtEnd {
  explicit AtEnd(F f) : f(std::move(f)) {}
  ~AtEnd() { f(); }
  F f;
};

// Slice `i` of `n`: bounds are multiples of the cache line, counted from the start.
Range slice_of(size_t nbytes, int i, int n) {
  const auto bound = [&](int j) { return std::min(nbytes, rounded(nbytes * at(j) / at(n), kLine)); };
  return {bound(i), bound(i + 1)};
}

}  // namespace

const char* name_of(Path path) {
  constexpr const char* names[] = {"slot", "push", "staged", "library", "unknown"};
  return names[static_cast<size_t>(path)];
}

Path parse_path(const std::string& name) {
  for (const Path path : {Path::slot, Path::push, Path::staged, Path::library})
    if (name == name_of(path)) return path;
  throw Error("Unknown path of an allreduce. Expected slot, push, staged or library. Received: " + name);
}

// Two of them take turns: a rank writes the one of call k again in call k + 2, and by then all others have posted call
// k + 1, which they do after they have read that of call k.
struct alignas(64) AllreduceCall::Post {
  std::atomic<uint64_t> call;  // written last
  int64_t signature;
  int64_t place;  // in an area: its id and the offset
  std::byte small[kLine - 24];
};

struct AllreduceCall::Counters {
  alignas(128) std::atomic<uint64_t> handed_out;  // the last call whose slice of this rank all may read
  alignas(128) std::atomic<uint64_t> consumed;    // the last staged call whose results this rank has copied out
  alignas(128) std::atomic<uint64_t> compared;    // the last call that the first rank has compared with other nodes
  std::atomic<uint64_t> refused_call;             // the last call for which another node wanted something else,
  int64_t refused;                                // namely this
};

AllreduceCall::AllreduceCall(const TeamContext& team, Transport& transport, Channel& control)
    : team_(team), topology_(*team.topology), transport_(transport), control_(control) {
  if (topology_.size == 1) return;
  channel_ = transport.open_channel();
  const auto local = at(topology_.local_size());
  const size_t counters = rounded(local * sizeof(Counters), kPage);
  const size_t posts = 2 * local * kPostBytes;
  segment_ = transport.open_segment(
      control, counters + posts + kPage + (local > 1 ? 2 * local * Area::stride_for(kStageBytes) : 0));
  counters_ = reinterpret_cast<Counters*>(segment_->data());
  posts_ = segment_->data() + counters;
  stages_ = posts_ + posts + kPage / 2;
}

AllreduceCall::~AllreduceCall() = default;

AllreduceCall::Post& AllreduceCall::post_of(int local_rank) const {
  const size_t index = (call_ & 1) * at(topology_.local_size()) + at(local_rank);
  return *reinterpret_cast<Post*>(posts_ + index * kPostBytes);
}

std::byte* AllreduceCall::payload(int local_rank, size_t nbytes) const {
  Post& post = post_of(local_rank);
  return nbytes <= sizeof post.small ? post.small : reinterpret_cast<std::byte*>(&post + 1);
}

std::byte* AllreduceCall::stage_of(int local_rank, uint64_t call) const {
  return stages_ + ((call & 1) * at(topology_.local_size()) + at(local_rank)) * Area::stride_for(kStageBytes);
}

std::byte* AllreduceCall::result_of(int owner, uint64_t call) const {
  return stage_of((owner + 1) % topology_.local_size(), call);
}

// ---- areas

std::shared_ptr<Area> AllreduceCall::make_area(size_t nbytes) {
  const size_t stride = Area::stride_for(nbytes);
  auto segment = transport_.open_segment(control_, at(topology_.local_size()) * stride);
  const std::lock_guard lock(areas_mutex_);
  auto area = std::make_shared<Area>(next_area_++, std::move(segment), nbytes, stride);
  areas_.erase(std::remove_if(areas_.begin(), areas_.end(), [](const auto& a) { return a.expired(); }), areas_.end());
  areas_.push_back(area);
  return area;
}

std::shared_ptr<Area> AllreduceCall::area_of(const void* data, size_t nbytes) const {
  if (next_area_.load(std::memory_order_relaxed) == 1) return nullptr;
  const std::lock_guard lock(areas_mutex_);
  for (const auto& weak : areas_) {
    auto area = weak.lock();
    if (!area) continue;
    const std::byte* mine = area->of(topology_.local_rank);
    const auto* begin = static_cast<const std::byte*>(data);
    if (begin >= mine && begin + nbytes <= mine + area->nbytes) return area;
  }
  return nullptr;
}

// ---- waiting

template <class Value>
void AllreduceCall::wait_for_ranks(int ranks, uint64_t target, Value&& value) {
  int late = 0;
  const auto ready = [&] {
    while (late < ranks && value(late) >= target) ++late;
    return late == ranks;
  };
  // Asked before each sleep.
  const auto abandoned = [&] {
    if (team_.bells[late].fate != Fate::left) return false;
    throw Error("Waited in allreduce for rank " + std::to_string(topology_.local_ranks()[at(late)]) +
                ", which has already left the job (it called finalize or reached the end of its script). Do all " +
                "ranks make the same calls?");
  };
  for (int i = 0; i < kGlances; ++i)
    if (ready()) return;
  wake_others();
  const double first = std::min(team_.stall_seconds, team_.timeout_seconds);
  if (wait_for(team_.patience, team_.my_bell(), first, ready, abandoned)) return;
  const int rank = topology_.local_ranks()[at(late)];
  if (team_.timeout_seconds > first) {
    std::fprintf(stderr, "keras_hpc: waiting: rank %d waits in allreduce (team %d) for rank %d, for %.0f s now\n",
                 topology_.rank, team_.number, rank, first);
    if (wait_for(team_.patience, team_.my_bell(), team_.timeout_seconds - first, ready, abandoned)) return;
  }
  throw Timeout(late_text() + "rank " + std::to_string(rank) + ". Do all ranks make the same calls?");
}

std::string AllreduceCall::late_text() const {
  return "Waited " + std::to_string(static_cast<int>(team_.timeout_seconds)) + " s in allreduce (team " +
         std::to_string(team_.number) + ", rank " + std::to_string(topology_.rank) + ") for ";
}

// Messages from other nodes ring no bell: sleep briefly.
template <class Ready>
void AllreduceCall::poll(Ready&& ready, int peer) {
  wake_others();
  if (!wait_for(team_.patience, team_.my_bell(), team_.timeout_seconds, ready, [] { return true; }))
    throw Timeout(late_text() + "a message from rank " + std::to_string(peer) + ". Do all ranks make the same calls?");
}

// Looking whether somebody sleeps needs a fence, which waits until this rank's own stores have reached the others. So
// it comes late: before this rank waits or works for long, and at the end of the call.
void AllreduceCall::wake_others() {
  if (!unannounced_) return;
  unannounced_ = false;
  team_.ring_node();
}

void AllreduceCall::hand_out(uint64_t call) {
  counters_[topology_.local_rank].handed_out.store(call, std::memory_order_release);
  unannounced_ = true;
}

void AllreduceCall::wait_until_handed_out(int owners, uint64_t call) {
  wait_for_ranks(owners, call, [&](int r) { return counters_[r].handed_out.load(std::memory_order_acquire); });
}

void AllreduceCall::consumed(uint64_t call) {
  counters_[topology_.local_rank].consumed.store(call, std::memory_order_release);
  unannounced_ = true;
}

// ---- what every call begins with

void AllreduceCall::post(int64_t signature, int64_t place, const void* data, size_t nbytes) {
  ++call_;
  Post& mine = post_of(topology_.local_rank);
  mine.signature = signature;
  mine.place = place;
  if (nbytes > 0) copy_shared(payload(topology_.local_rank, nbytes), data, nbytes);
  mine.call.store(call_, std::memory_order_release);
  unannounced_ = true;
}

void AllreduceCall::meet() {
  wait_for_ranks(topology_.local_size(), call_, [&](int r) { return post_of(r).call.load(std::memory_order_acquire); });
  const Post& mine = post_of(topology_.local_rank);
  for (int r = 0; r < topology_.local_size(); ++r) {
    const Post& other = post_of(r);
    if (other.signature == mine.signature && other.place == mine.place) continue;
    consumed(call_);
    if (topology_.node_count > 1 && topology_.local_rank == 0) exchange(kDisagreement, nullptr, 0);
    const std::string rank = "rank " + std::to_string(topology_.local_ranks()[at(r)]);
    if (other.signature != mine.signature)
      throw PlanMismatch(disagreement(topology_.rank, mine.signature, rank, other.signature));
    throw PlanMismatch("Ranks disagree on what to reduce: rank " + std::to_string(topology_.rank) + " and " + rank +
                       " gave different arrays, or different parts, of keras_hpc.empty.");
  }
}

// ---- between nodes

void AllreduceCall::across_nodes(void* data, size_t count, DType dtype, Op op, int tag) {
  if (count == 0) return;
  const auto allreduce = make_allreduce(
      {*channel_, topology_.peers_of_slice(topology_.local_rank), topology_.node, data, count, dtype, op, tag});
  poll([&] { return allreduce->advance(); }, allreduce->waiting_for());
}

int64_t AllreduceCall::exchange(int64_t signature, const void* data, size_t nbytes) {
  if (topology_.node_count > kFewNodes) {
    int64_t extremes[] = {signature, -signature};
    across_nodes(extremes, 2, DType::int64, Op::max, kWordTag);
    return extremes[0] != signature ? extremes[0] : -extremes[1];
  }
  const auto me = at(topology_.node);
  const std::vector<int> peers = topology_.peers_of_slice(0);
  messages_.resize(peers.size() * kMessageBytes);
  std::memcpy(message(me), &signature, sizeof signature);
  if (nbytes > 0) std::memcpy(message(me) + sizeof signature, data, nbytes);
  std::vector<std::pair<int, RequestPtr>> requests;
  for (size_t i = 0; i < peers.size(); ++i) {
    if (i == me) continue;
    requests.emplace_back(peers[i], channel_->receive(message(i), kMessageBytes, peers[i], kWordTag));
    requests.emplace_back(peers[i], channel_->send(message(me), sizeof signature + nbytes, peers[i], kWordTag));
  }
  for (const auto& [peer, request] : requests) poll([r = request.get()] { return r->test(); }, peer);
  for (size_t i = 0; i < peers.size(); ++i) {
    int64_t theirs = 0;
    std::memcpy(&theirs, message(i), sizeof theirs);
    if (theirs != signature) return theirs;
  }
  return signature;
}

std::byte* AllreduceCall::message(size_t node) {
  return messages_.data() + node * kMessageBytes;
}

void AllreduceCall::compare_nodes(const void* data, size_t nbytes) {
  if (topology_.node_count == 1) return;
  const int64_t mine = post_of(topology_.local_rank).signature;
  Counters& first = counters_[0];
  if (topology_.local_rank == 0) {
    if (const int64_t theirs = exchange(mine, data, nbytes); theirs != mine) {
      first.refused = theirs;
      first.refused_call.store(call_, std::memory_order_relaxed);
    }
    first.compared.store(call_, std::memory_order_release);
    unannounced_ = true;
  } else {
    wait_for_ranks(1, call_, [&](int) { return first.compared.load(std::memory_order_acquire); });
  }
  if (first.refused_call.load(std::memory_order_relaxed) != call_) return;
  consumed(call_);
  throw PlanMismatch(disagreement(topology_.rank, mine, "a rank of another node", first.refused));
}

std::vector<double> AllreduceCall::gather(const std::vector<double>& mine) {
  std::vector<double> all(mine.size() * at(topology_.size));
  const std::vector<size_t> nbytes_by_rank(at(topology_.size), mine.size() * sizeof(double));
  const RequestPtr request = channel_->allgather(mine.data(), all.data(), nbytes_by_rank);
  poll([&] { return request->test(); }, topology_.rank == 0 ? 1 : 0);
  return all;
}

// ---- the call

bool AllreduceCall::can(Path path, const void* data, size_t count, DType dtype, Op op) const {
  const size_t nbytes = count * size_of(dtype);
  switch (path) {
    case Path::slot:
      return nbytes <= kSlotBytes && topology_.node_count <= kFewNodes;
    case Path::push:
      return area_of(data, nbytes) != nullptr;
    case Path::staged:
      return true;
    case Path::library:
      return channel_->can_allreduce(dtype, op == Op::mean ? Op::sum : op);
    case Path::unknown:
      return true;
  }
  return false;
}

void AllreduceCall::run(void* data, size_t count, DType dtype, Op op) {
  if (topology_.size == 1) return;
  Path path = choice_for(data, count * size_of(dtype)).value_or(Path::unknown);
  if (!can(path, data, count, dtype, op)) path = fallback(data, count * size_of(dtype));
  run(data, count, dtype, op, path);
}

void AllreduceCall::run(void* data, size_t count, DType dtype, Op op, Path path) {
  if (topology_.size == 1) return;
  const Buffer buffer{
      static_cast<std::byte*>(data),         count, dtype, op, op == Op::mean ? 1.0 / topology_.size : 1.0,
      make_signature(path, dtype, op, count)};
  if (!can(path, data, count, dtype, op))
    throw Error("An allreduce of " + std::to_string(buffer.nbytes()) + " bytes of this array cannot take the path '" +
                name_of(path) + "'.");
  const std::lock_guard lock(mutex_);
  const AtEnd wake([this] { wake_others(); });
  take(path, buffer);
}

void AllreduceCall::take(Path path, const Buffer& b) {
  switch (path) {
    case Path::slot:
      return slot(b);
    case Path::push:
      return push(b);
    case Path::staged:
      return staged(b);
    case Path::library:
      return library(b);
    case Path::unknown: {
      const bool in_area = area_of(b.data, b.nbytes()) != nullptr;
      post(b.signature, in_area);
      meet();
      compare_nodes();
      Path best = measure(b, in_area);
      if (!can(best, b.data, b.count, b.dtype, b.op)) best = fallback(b.data, b.nbytes());
      return take(best, {b.data, b.count, b.dtype, b.op, b.scale, make_signature(best, b.dtype, b.op, b.count)});
    }
  }
}

void AllreduceCall::slot(const Buffer& b) {
  const size_t nbytes = b.nbytes();
  post(b.signature, 0, b.data, nbytes);
  meet();
  const auto local = at(topology_.local_size());
  sources_.clear();
  for (int r = 0; r < topology_.local_size(); ++r) sources_.push_back({payload(r, nbytes), 1.0});
  void* out = b.data;
  const bool alone = topology_.node_count == 1;
  if (alone || topology_.local_rank == 0)
    reduce(b.dtype, b.op, sources_.data(), local, false, b.scale, &out, 1, b.count);
  if (alone) return;

  // The first rank of each node exchanges the node's result with those of the others; the rest read its answer.
  std::byte* answer = payload(0, nbytes);
  compare_nodes(out, nbytes);
  if (topology_.local_rank == 0) {
    sources_.clear();
    for (size_t i = 0; i < at(topology_.node_count); ++i) sources_.push_back({message(i) + sizeof(int64_t), 1.0});
    void* const outs[] = {answer, out};
    reduce(b.dtype, b.op, sources_.data(), sources_.size(), false, 1.0, outs, 2, b.count);
    hand_out(call_);
  } else {
    wait_until_handed_out(1, call_);
    std::memcpy(out, answer, nbytes);
  }
}

void AllreduceCall::push(const Buffer& b) {
  const std::shared_ptr<Area> area = area_of(b.data, b.nbytes());
  const auto offset = static_cast<size_t>(b.data - area->of(topology_.local_rank));
  post(b.signature, (static_cast<int64_t>(area->id) << 44) | static_cast<int64_t>(offset));
  meet();
  compare_nodes();
  wake_others();
  if (owns_slice()) {
    const Range slice = slice_of(b.nbytes(), topology_.local_rank, topology_.owners);
    const size_t count = slice.size() / size_of(b.dtype);
    sources_.clear();
    outs_.clear();
    for (int r = 0; r < topology_.local_size(); ++r) {
      outs_.push_back(area->of(r) + offset + slice.begin);
      sources_.push_back({outs_.back(), 1.0});
    }
    std::swap(outs_[0], outs_[at(topology_.local_rank)]);  // this rank's own array first
    const bool alone = topology_.node_count == 1;
    reduce(b.dtype, b.op, sources_.data(), sources_.size(), false, b.scale, outs_.data(), alone ? outs_.size() : 1,
           count);
    if (!alone) {
      across_nodes(outs_[0], count, b.dtype, b.op, kDataTag);
      for (size_t i = 1; i < outs_.size(); ++i) std::memcpy(outs_[i], outs_[0], slice.size());
    }
    hand_out(call_);
  }
  wait_until_handed_out(topology_.owners, call_);
}

void AllreduceCall::staged(const Buffer& b) {
  const size_t nbytes = b.nbytes();
  // Without ranks that share a node there is nothing to stage. The same on all ranks.
  const size_t step = topology_.size > topology_.node_count ? kStageBytes : std::max<size_t>(nbytes, 1);
  const auto chunk = [&](size_t begin) { return Chunk{b.data + begin, std::min(step, nbytes - begin)}; };
  stage_in(chunk(0), call_ + 1);
  post(b.signature, 0);
  for (size_t begin = 0; begin < nbytes || begin == 0; begin += step) {
    meet();
    const uint64_t call = call_;
    if (begin == 0) compare_nodes();
    wake_others();
    if (owns_slice()) {
      reduce_stage(b, chunk(begin), call);
      hand_out(call);
    }
    if (begin + step < nbytes) {  // while others still reduce
      stage_in(chunk(begin + step), call + 1);
      post(b.signature, 0);
    }
    wait_until_handed_out(topology_.owners, call);
    wake_others();
    stage_out(chunk(begin), call);
  }
}

void AllreduceCall::stage_in(const Chunk& chunk, uint64_t call) {
  uint64_t& last = stage_used_[call & 1];
  wait_for_ranks(topology_.local_size(), last,
                 [&](int r) { return counters_[r].consumed.load(std::memory_order_acquire); });
  last = call;
  std::byte* mine = stage_of(topology_.local_rank, call);
  for (int owner = 0; owner < topology_.owners; ++owner) {
    const Range slice = slice_of(chunk.nbytes, owner, topology_.owners);
    if (owner != topology_.local_rank && !slice.empty())
      copy_shared(mine + slice.begin, chunk.data + slice.begin, slice.size());
  }
}

void AllreduceCall::reduce_stage(const Buffer& b, const Chunk& chunk, uint64_t call) {
  const int me = topology_.local_rank;
  const Range slice = slice_of(chunk.nbytes, me, topology_.owners);
  if (slice.empty()) return;
  const size_t count = slice.size() / size_of(b.dtype);
  sources_.clear();
  for (int r = 0; r < topology_.local_size(); ++r)
    sources_.push_back({(r == me ? chunk.data : stage_of(r, call)) + slice.begin, 1.0});
  const bool alone = topology_.node_count == 1;
  const bool shared = topology_.local_size() > 1;
  // The result replaces what another rank has staged: each line of memory goes from core to core and back, and no
  // second one does.
  void* const outs[] = {chunk.data + slice.begin, shared ? result_of(me, call) + slice.begin : nullptr};
  reduce(b.dtype, b.op, sources_.data(), sources_.size(), false, b.scale, outs, alone ? 2 : 1, count);
  if (alone) return;
  across_nodes(outs[0], count, b.dtype, b.op, kDataTag);
  if (shared) copy_shared(outs[1], outs[0], slice.size());
}

void AllreduceCall::stage_out(const Chunk& chunk, uint64_t call) {
  for (int owner = 0; owner < topology_.owners; ++owner) {
    const Range slice = slice_of(chunk.nbytes, owner, topology_.owners);
    if (owner != topology_.local_rank && !slice.empty())
      copy_shared(chunk.data + slice.begin, result_of(owner, call) + slice.begin, slice.size());
  }
  consumed(call);
}

void AllreduceCall::library(const Buffer& b) {
  post(b.signature, 0);
  meet();
  compare_nodes();
  wake_others();
  channel_->allreduce(b.data, b.count, b.dtype, b.op == Op::mean ? Op::sum : b.op);
  if (b.scale == 1.0) return;
  const Source source{b.data, 1.0};
  void* out = b.data;
  reduce(b.dtype, Op::sum, &source, 1, false, b.scale, &out, 1, b.count);
}

}  // namespace keras_hpc
