// SPDX-License-Identifier: Apache-2.0
#include "engine/allreduce_call.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/error.hpp"
#include "common/index.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
size_t rounded(size_t nbytes, size_t unit) {
  return (nbytes + unit - 1) / unit * unit;
}

// What a rank asks for as one number: equal on all ranks, or it is an error.
int64_t make_signature(Path path, DType dtype, DType wire, Op op, size_t count) {
  return static_cast<int64_t>(count << 12) | (static_cast<int64_t>(wire) << 9) | (static_cast<int64_t>(path) << 6) |
         (static_cast<int64_t>(dtype) << 3) | static_cast<int64_t>(op);
}
// Together with the tag. Not negative, as the meeting wants it.
int64_t tagged(int64_t signature, uint64_t tag) {
  const uint64_t mixed = static_cast<uint64_t>(signature) ^ (tag * 0x9e3779b97f4a7c15ULL);
  return static_cast<int64_t>(mixed & ((uint64_t{1} << 62) - 1));
}
std::string describe(bool in_area, DType dtype, DType wire, Op op, size_t count) {
  return std::string(name_of(op)) + " of " + std::to_string(count) + " x " + name_of(dtype) +
         (wire == dtype ? "" : std::string(", sent as ") + name_of(wire)) +
         (in_area ? " in memory of keras_hpc.empty" : "");
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

AllreduceCall::AllreduceCall(const TeamContext& team, Transport& transport, Channel& control)
    : team_(team), topology_(*team.topology), transport_(transport) {
  if (topology_.size == 1) return;
  meeting_ = std::make_unique<Meeting>(team, transport, control);
  const auto local = at(topology_.local_size());
  stages_ = transport.open_segment(control, local == 1 ? kPage : 2 * local * Area::stride_for(kStageBytes));
}

AllreduceCall::~AllreduceCall() = default;

size_t AllreduceCall::segment_bytes() const {
  return (meeting_ ? meeting_->segment_bytes() : 0) + (stages_ ? stages_->nbytes() : 0);
}

std::byte* AllreduceCall::stage_of(int local_rank, uint64_t call) const {
  return stages_->data() + ((call & 1) * at(topology_.local_size()) + at(local_rank)) * Area::stride_for(kStageBytes);
}

std::byte* AllreduceCall::result_of(int owner, uint64_t call) const {
  return stage_of((owner + 1) % topology_.local_size(), call);
}

// ---- areas

std::shared_ptr<Area> AllreduceCall::make_area(Channel& channel, size_t nbytes) {
  const size_t stride = Area::stride_for(nbytes);
  auto segment = transport_.open_segment(channel, 0, stride);
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

// ---- the call

bool AllreduceCall::can(Path path, const void* data, size_t count, DType dtype, Op op) const {
  const size_t nbytes = count * size_of(dtype);
  switch (path) {
    case Path::slot:
      return nbytes <= kSlotBytes && topology_.node_count <= Meeting::kFewNodes;
    case Path::push:
      return area_of(data, nbytes) != nullptr;
    case Path::staged:
      return true;
    case Path::library:
      return meeting_->channel().can_allreduce(dtype, op == Op::mean ? Op::sum : op);
    case Path::peer:
    case Path::nccl:
    case Path::hierarchical:
    case Path::mpi:
    case Path::unknown:
      return true;
  }
  return false;
}

void AllreduceCall::run(void* data, size_t count, DType dtype, Op op, std::optional<DType> wire,
                        std::optional<Path> path, uint64_t tag) {
  if (topology_.size == 1) return;
  // Only here: what other types travel as is their own affair.
  const DType sent = wire && dtype == DType::float32 && topology_.node_count > 1 ? *wire : dtype;
  const size_t nbytes = count * size_of(dtype);
  const bool rounds = sent != dtype;
  if (!path) {
    path = way_of(data, count, dtype, op, rounds);
  } else if (!can(*path, data, count, dtype, op) || (rounds && *path == Path::library)) {
    throw Error("An allreduce of " + std::to_string(nbytes) + " bytes of this array cannot take the path '" +
                name_of(*path) + "'.");
  }
  const std::lock_guard lock(mutex_);
  const AtEnd wake([this] { meeting_->wake_others(); });
  try {
    take(*path, {static_cast<std::byte*>(data), count, dtype, op, sent, op == Op::mean ? 1.0 / topology_.size : 1.0,
                 tagged(make_signature(*path, dtype, sent, op, count), tag), tag});
  } catch (const PlanMismatch& e) {
    throw Disagreement(e.what(), describe(area_of(data, nbytes) != nullptr, dtype, sent, op, count));
  }
}

void AllreduceCall::meet(uint64_t tag, const std::string& label) {
  if (topology_.size == 1) return;
  const std::lock_guard lock(mutex_);
  const AtEnd wake([this] { meeting_->wake_others(); });
  // No allreduce has all bits of a path.
  meeting_->post(tagged(int64_t{7} << 6, tag), 0, nullptr, 0, &label);
  meeting_->meet();
  meeting_->compare_nodes();
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
    case Path::peer:
    case Path::nccl:
    case Path::hierarchical:
    case Path::mpi:
    case Path::unknown: {
      const bool in_area = area_of(b.data, b.nbytes()) != nullptr;
      meeting_->post(tagged(b.signature, in_area), 0);  // other nodes compare only that
      meeting_->meet();
      meeting_->compare_nodes();
      Path best = measure(b, in_area);
      if (!can(best, b.data, b.count, b.dtype, b.op) || (b.wire != b.dtype && best == Path::library))
        best = fallback(b.data, b.nbytes());
      return take(best, {b.data, b.count, b.dtype, b.op, b.wire, b.scale,
                         tagged(make_signature(best, b.dtype, b.wire, b.op, b.count), b.tag), b.tag});
    }
  }
}

void AllreduceCall::slot(const Buffer& b) {
  const size_t nbytes = b.nbytes();
  meeting_->post(b.signature, 0, b.data, nbytes);
  meeting_->meet();
  const auto local = at(topology_.local_size());
  sources_.clear();
  for (int r = 0; r < topology_.local_size(); ++r) sources_.push_back({meeting_->posted(r, nbytes), 1.0});
  void* out = b.data;
  const bool alone = topology_.node_count == 1;
  if (alone || topology_.local_rank == 0)
    reduce(b.dtype, b.op, sources_.data(), local, false, b.scale, &out, 1, b.count);
  if (alone) return;

  // The first rank of each node exchanges the node's result with those of the others; the rest read its answer.
  std::byte* answer = meeting_->posted(0, nbytes);
  meeting_->compare_nodes(out, nbytes);
  if (topology_.local_rank == 0) {
    sources_.clear();
    for (int i = 0; i < topology_.node_count; ++i) sources_.push_back({meeting_->posted_by_node(i), 1.0});
    void* const outs[] = {answer, out};
    reduce(b.dtype, b.op, sources_.data(), sources_.size(), false, 1.0, outs, 2, b.count);
    meeting_->hand_out(meeting_->call());
  } else {
    meeting_->wait_until_handed_out(1, meeting_->call());
    std::memcpy(out, answer, nbytes);
  }
}

void AllreduceCall::push(const Buffer& b) {
  const std::shared_ptr<Area> area = area_of(b.data, b.nbytes());
  const auto offset = static_cast<size_t>(b.data - area->of(topology_.local_rank));
  meeting_->post(b.signature, (static_cast<int64_t>(area->id) << 44) | static_cast<int64_t>(offset));
  meeting_->meet();
  meeting_->compare_nodes();
  meeting_->wake_others();
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
    if (topology_.node_count == 1)
      reduce(b.dtype, b.op, sources_.data(), sources_.size(), false, b.scale, outs_.data(), outs_.size(), count);
    else
      across_nodes(b, count);
    team_.failure->throw_if_neighbour_failed();  // then its array was not as it had said
    meeting_->hand_out(meeting_->call());
  }
  meeting_->wait_until_handed_out(topology_.owners, meeting_->call());
}

void AllreduceCall::staged(const Buffer& b) {
  const size_t nbytes = b.nbytes();
  // Without ranks that share a node there is nothing to stage. The same on all ranks.
  const size_t step = topology_.size > topology_.node_count ? kStageBytes : std::max<size_t>(nbytes, 1);
  const auto chunk = [&](size_t begin) { return Chunk{b.data + begin, std::min(step, nbytes - begin)}; };
  stage_in(chunk(0), meeting_->call() + 1);
  meeting_->post(b.signature, 0);
  for (size_t begin = 0; begin < nbytes || begin == 0; begin += step) {
    meeting_->meet();
    const uint64_t call = meeting_->call();
    if (begin == 0) meeting_->compare_nodes();
    meeting_->wake_others();
    if (owns_slice()) {
      reduce_stage(b, chunk(begin), call);
      meeting_->hand_out(call);
    }
    if (begin + step < nbytes) {  // while others still reduce
      stage_in(chunk(begin + step), call + 1);
      meeting_->post(b.signature, 0);
    }
    meeting_->wait_until_handed_out(topology_.owners, call);
    meeting_->wake_others();
    stage_out(chunk(begin), call);
  }
}

void AllreduceCall::stage_in(const Chunk& chunk, uint64_t call) {
  uint64_t& last = stage_used_[call & 1];
  meeting_->wait_until_consumed(last);
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
  // The result replaces what another rank has staged: each line of memory goes from core to core and back, and no
  // second one does.
  outs_.assign({chunk.data + slice.begin});
  if (topology_.local_size() > 1) outs_.push_back(result_of(me, call) + slice.begin);
  if (topology_.node_count == 1)
    reduce(b.dtype, b.op, sources_.data(), sources_.size(), false, b.scale, outs_.data(), outs_.size(), count);
  else
    across_nodes(b, count);
}

// The network has one segment while memory has the next or the last. Its memory is the engine's: it may go on sending
// from there and receiving when the caller has been told of an error.
void AllreduceCall::across_nodes(const Buffer& b, size_t count) {
  const size_t size = size_of(b.dtype);
  const auto before = [&](size_t begin, size_t n, std::byte* data) {
    std::vector<Source> sources = sources_;
    for (Source& source : sources) source.data = static_cast<const std::byte*>(source.data) + begin * size;
    void* out = data;
    reduce(b.dtype, b.op, sources.data(), sources.size(), false, b.scale, &out, 1, n);
    team_.failure->throw_if_neighbour_failed();  // before the sum goes anywhere
  };
  const auto after = [&](size_t begin, size_t n, const std::byte* data) {
    for (void* out : outs_) copy_shared(static_cast<std::byte*>(out) + begin * size, data, n * size);
  };
  meeting_->across_nodes(algorithm_for(count * size, false), count, b.dtype, b.wire, b.op, before, after);
}

void AllreduceCall::stage_out(const Chunk& chunk, uint64_t call) {
  for (int owner = 0; owner < topology_.owners; ++owner) {
    const Range slice = slice_of(chunk.nbytes, owner, topology_.owners);
    if (owner != topology_.local_rank && !slice.empty())
      copy_shared(chunk.data + slice.begin, result_of(owner, call) + slice.begin, slice.size());
  }
  meeting_->consumed(call);
}

void AllreduceCall::library(const Buffer& b) {
  meeting_->post(b.signature, 0);
  meeting_->meet();
  meeting_->compare_nodes();
  meeting_->wake_others();
  meeting_->call_library(b.data, b.count, b.dtype, b.op == Op::mean ? Op::sum : b.op);
  if (b.scale == 1.0) return;
  const Source source{b.data, 1.0};
  void* out = b.data;
  reduce(b.dtype, Op::sum, &source, 1, false, b.scale, &out, 1, b.count);
}

}  // namespace keras_hpc
