// SPDX-License-Identifier: Apache-2.0
#include "engine/meeting.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

// Looks at what other ranks have done, before the first one at the clock.
constexpr int kGlances = 64;
constexpr size_t kPostBytes = kLine + Meeting::kSlotBytes;
constexpr int kWordTag = 1;
constexpr int kDataTag = 2;  // and kSegmentTags in all
constexpr size_t kMessageBytes = sizeof(int64_t) + Meeting::kSlotBytes;
// What the first rank of a node tells the others if the ranks of its own node disagree.
constexpr int64_t kDisagreement = -1;

}  // namespace

// Two of them take turns: a rank writes the one of call k again in call k + 2, and by then all others have posted call
// k + 1, which they do after they have read that of call k.
struct alignas(64) Meeting::Post {
  std::atomic<uint64_t> call;  // written last
  int64_t signature;
  int64_t place;  // in an area: its id and the offset
  std::byte small[kLine - 24];
};

struct Meeting::Counters {
  alignas(128) std::atomic<uint64_t> handed_out;  // the last call whose slice of this rank all may read
  alignas(128) std::atomic<uint64_t> consumed;    // the last staged call whose results this rank has copied out
  alignas(128) std::atomic<uint64_t> compared;    // the last call that the first rank has compared with other nodes
  std::atomic<uint64_t> refused_call;             // the last call for which another node wanted something else
};

Meeting::Meeting(const TeamContext& team, Transport& transport, Channel& control)
    : team_(team), topology_(*team.topology), channel_(transport.open_channel()) {
  const auto local = at(topology_.local_size());
  const size_t counters = (local * sizeof(Counters) + kPage - 1) / kPage * kPage;
  segment_ = transport.open_segment(control, counters + 2 * local * kPostBytes);
  counters_ = reinterpret_cast<Counters*>(segment_->data());
  posts_ = segment_->data() + counters;
}

Meeting::~Meeting() = default;

Meeting::Post& Meeting::post_of(int local_rank) const {
  const size_t index = (call_ & 1) * at(topology_.local_size()) + at(local_rank);
  return *reinterpret_cast<Post*>(posts_ + index * kPostBytes);
}

std::byte* Meeting::posted(int local_rank, size_t nbytes) const {
  Post& post = post_of(local_rank);
  return nbytes <= sizeof post.small ? post.small : reinterpret_cast<std::byte*>(&post + 1);
}

// ---- waiting

template <class Value>
void Meeting::wait_for_ranks(int ranks, uint64_t target, Value&& value) {
  int late = 0;
  const auto ready = [&] {
    while (late < ranks && value(late) >= target) ++late;
    return late == ranks;
  };
  // Asked before each sleep.
  const auto abandoned = [&] {
    // A rank that has left may have posted just before.
    if (team_.bells[late].fate != Fate::left || value(late) >= target) return false;
    throw Error("Waited in " + name() + " for rank " + std::to_string(topology_.local_ranks()[at(late)]) +
                ", which has already left the job (it called finalize or reached the end of its script). Do all " +
                "ranks make the same calls?");
  };
  for (int i = 0; i < kGlances; ++i)
    if (ready()) return;
  wake_others();
  const auto missing = [&] {
    std::vector<int> found;
    for (int r = 0; r < ranks; ++r)
      if (value(r) < target) found.push_back(topology_.local_ranks()[at(r)]);
    return found;
  };
  if (wait_watched(team_, ready, abandoned, [&] { return stall(missing); })) return;
  const int rank = topology_.local_ranks()[at(late)];
  throw Timeout(late_text() + "rank " + std::to_string(rank) + ". Do all ranks make the same calls?");
}

std::string Meeting::late_text() const {
  return "Waited " + std::to_string(static_cast<int>(team_.timeout_seconds)) + " s in " + name() + " (team " +
         std::to_string(team_.number) + ", rank " + std::to_string(topology_.rank) + ") for ";
}

Stall Meeting::stall(std::function<std::vector<int>()> missing) const {
  if (label_ == nullptr) return {"allreduce", team_.activity->calls, "", -1, std::move(missing)};
  return {"collective", team_.activity->collectives, *label_, -1, std::move(missing)};
}

std::string Meeting::name() const {
  return label_ == nullptr ? "allreduce" : *label_;
}

// Messages from other nodes ring no bell: sleep briefly.
template <class Ready, class Peer>
void Meeting::poll(Ready&& ready, Peer&& peer) {
  wake_others();
  const auto describe = [&] { return stall([rank = peer()] { return std::vector<int>{rank}; }); };
  if (!wait_watched(team_, ready, [] { return true; }, describe))
    throw Timeout(late_text() + "a message from rank " + std::to_string(peer()) +
                  ". Do all ranks make the same calls?");
}

// Looking whether somebody sleeps needs a fence, which waits until this rank's own stores have reached the others. So
// it comes late: before this rank waits or works for long, and at the end of the call.
void Meeting::wake_others() {
  if (!unannounced_) return;
  unannounced_ = false;
  team_.ring_node();
}

void Meeting::hand_out(uint64_t call) {
  counters_[topology_.local_rank].handed_out.store(call, std::memory_order_release);
  unannounced_ = true;
}

void Meeting::wait_until_handed_out(int owners, uint64_t call) {
  wait_for_ranks(owners, call, [&](int r) { return counters_[r].handed_out.load(std::memory_order_acquire); });
}

void Meeting::wait_until_consumed(uint64_t call) {
  wait_for_ranks(topology_.local_size(), call,
                 [&](int r) { return counters_[r].consumed.load(std::memory_order_acquire); });
}

void Meeting::consumed(uint64_t call) {
  counters_[topology_.local_rank].consumed.store(call, std::memory_order_release);
  unannounced_ = true;
}

// ---- what every call begins with

void Meeting::post(int64_t signature, int64_t place, const void* data, size_t nbytes, const std::string* label) {
  ++call_;
  label_ = label;
  Post& mine = post_of(topology_.local_rank);
  mine.signature = signature;
  mine.place = place;
  if (nbytes > 0) copy_shared(posted(topology_.local_rank, nbytes), data, nbytes);
  mine.call.store(call_, std::memory_order_release);
  unannounced_ = true;
}

void Meeting::meet() {
  wait_for_ranks(topology_.local_size(), call_, [&](int r) { return post_of(r).call.load(std::memory_order_acquire); });
  const Post& mine = post_of(topology_.local_rank);
  for (int r = 0; r < topology_.local_size(); ++r) {
    const Post& other = post_of(r);
    if (other.signature == mine.signature && other.place == mine.place) continue;
    consumed(call_);
    if (topology_.node_count > 1 && topology_.local_rank == 0) exchange(kDisagreement, nullptr, 0);
    if (other.signature != mine.signature) throw PlanMismatch("Ranks disagree on what to communicate.");
    throw PlanMismatch("Ranks disagree on what to communicate: rank " + std::to_string(topology_.rank) + " and rank " +
                       std::to_string(topology_.local_ranks()[at(r)]) +
                       " gave different arrays, or different parts, of keras_hpc.empty.");
  }
}

// ---- between nodes

void Meeting::across_nodes(Algorithm algorithm, void* data, size_t count, DType dtype, DType wire, Op op,
                           OnSegment before, OnSegment after) {
  if (count == 0) return;
  const auto allreduce = make_segmented(algorithm,
                                        {*channel_, topology_.peers_of_slice(topology_.local_rank), topology_.node,
                                         data, count, dtype, wire, op, kDataTag},
                                        std::move(before), std::move(after));
  poll([&] { return allreduce->advance(); }, [&] { return allreduce->waiting_for(); });
}

void Meeting::call_library(void* data, size_t count, DType dtype, Op op) {
  Activity::Note note(*team_.activity, stall(nullptr));
  channel_->allreduce(data, count, dtype, op);
  note.resolve();
}

int64_t Meeting::exchange(int64_t signature, const void* data, size_t nbytes) {
  if (topology_.node_count > kFewNodes) {
    int64_t extremes[] = {signature, -signature};
    const auto allreduce =
        make_allreduce(Algorithm::recursive_doubling, {*channel_, topology_.peers_of_slice(0), topology_.node, extremes,
                                                       2, DType::int64, DType::int64, Op::max, kWordTag});
    poll([&] { return allreduce->advance(); }, [&] { return allreduce->waiting_for(); });
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
  for (const auto& [peer, request] : requests)
    poll([r = request.get()] { return r->test(); }, [p = peer] { return p; });
  for (size_t i = 0; i < peers.size(); ++i) {
    int64_t theirs = 0;
    std::memcpy(&theirs, message(i), sizeof theirs);
    if (theirs != signature) return theirs;
  }
  return signature;
}

std::byte* Meeting::message(size_t node) {
  return messages_.data() + node * kMessageBytes;
}

const std::byte* Meeting::posted_by_node(int node) const {
  return messages_.data() + at(node) * kMessageBytes + sizeof(int64_t);
}

void Meeting::compare_nodes(const void* data, size_t nbytes) {
  if (topology_.node_count == 1) return;
  const int64_t mine = post_of(topology_.local_rank).signature;
  Counters& first = counters_[0];
  if (topology_.local_rank == 0) {
    if (exchange(mine, data, nbytes) != mine) first.refused_call.store(call_, std::memory_order_relaxed);
    first.compared.store(call_, std::memory_order_release);
    unannounced_ = true;
  } else {
    wait_for_ranks(1, call_, [&](int) { return first.compared.load(std::memory_order_acquire); });
  }
  if (first.refused_call.load(std::memory_order_relaxed) != call_) return;
  consumed(call_);
  throw PlanMismatch("Ranks disagree on what to communicate, on this node and on another.");
}

std::vector<double> Meeting::gather(const std::vector<double>& mine) {
  std::vector<double> all(mine.size() * at(topology_.size));
  const std::vector<size_t> nbytes_by_rank(at(topology_.size), mine.size() * sizeof(double));
  const RequestPtr request = channel_->allgather(mine.data(), all.data(), nbytes_by_rank);
  poll([&] { return request->test(); }, [&] { return topology_.rank == 0 ? 1 : 0; });
  return all;
}

}  // namespace keras_hpc
