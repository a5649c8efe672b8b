// SPDX-License-Identifier: Apache-2.0
#include "engine/meeting.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"
#include "transport/pending.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

// Looks at what other ranks have done, before the first one at the clock.
constexpr int kGlances = 64;
constexpr size_t kPostBytes = kLine + Meeting::kSlotBytes;
constexpr int kWordTag = 1;
constexpr int kDataTag = 2;  // and SegmentedAllreduce::kTags in all
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
  if (topology_.node_count > 1) library_ = transport.open_library_channel();
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

// For ranks that `missing` names, on this node or, with `outside`, on another one. Unless that is `certain`, they may
// be waiting themselves.
class Meeting::Waiting final : public Awaited {
 public:
  Waiting(const Meeting& meeting, const std::function<std::vector<int>()>& missing, bool certain, bool outside)
      : meeting_(meeting), missing_(missing), certain_(certain), outside_(outside) {}
  std::string name() const override {
    return "Waited in " + meeting_.name() + " (team " + std::to_string(meeting_.team_.number) + ", rank " +
           std::to_string(meeting_.topology_.rank) + ")";
  }
  std::vector<int> missing() const override { return certain_ ? missing_() : std::vector<int>(); }
  std::vector<int> suspects() const override { return certain_ ? std::vector<int>() : missing_(); }
  bool is_outside() const override { return outside_; }
  Stall stall() const override { return meeting_.stall(missing_); }

 private:
  const Meeting& meeting_;
  const std::function<std::vector<int>()>& missing_;
  bool certain_, outside_;
};

template <class Value>
void Meeting::wait_for_ranks(int ranks, uint64_t target, Value&& value, bool certain) {
  int late = 0;
  const auto ready = [&] {
    while (late < ranks && value(late) >= target) ++late;
    return late == ranks;
  };
  for (int i = 0; i < kGlances; ++i)
    if (ready()) return;
  wake_others();
  const std::function<std::vector<int>()> missing = [&] {
    std::vector<int> found;
    for (int r = 0; r < ranks; ++r)
      if (value(r) < target) found.push_back(topology_.local_ranks()[at(r)]);
    return found;
  };
  int idle = -1;
  if (wait_watched(team_, team_.my_bell(), ready, Waiting(*this, missing, certain, false), &idle)) return;
  const std::vector<int> free = certain ? team_.failure->outside_mpi(missing()) : std::vector<int>();
  const int known = free.empty() ? idle : free[0];
  throw Timeout(
      late_text() + "rank " +
          (known >= 0 ? std::to_string(known)
                      : std::to_string(topology_.local_ranks()[at(late)]) + ", which may wait for another one") +
          ". Do all ranks make the same calls?",
      known);
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

template <class Ready, class Peer>
void Meeting::poll(Ready&& ready, Peer&& peer) {
  wake_others();
  const std::function<std::vector<int>()> missing = [rank = peer()] {
    return rank < 0 ? std::vector<int>() : std::vector<int>{rank};
  };
  if (wait_watched(team_, team_.my_bell(), ready, Waiting(*this, missing, true, true))) return;
  const std::string sender = peer() < 0 ? "the other ranks" : "rank " + std::to_string(peer());
  throw Timeout(late_text() + "a message from " + sender + ". Do all ranks make the same calls?", peer());
}

// Each step that is done counts as an answer: whoever waits for the next one begins with a spin again.
template <class Operation>
void Meeting::complete(Operation& operation) {
  Progress progress = Progress::none;
  while (progress != Progress::done)
    poll([&] { return (progress = operation.advance()) != Progress::none; }, [&] { return operation.waiting_for(); });
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
  const auto value = [&](int r) { return counters_[r].handed_out.load(std::memory_order_acquire); };
  wait_for_ranks(owners, call, value, topology_.node_count == 1);
}

void Meeting::wait_until_consumed(uint64_t call) {
  const auto value = [&](int r) { return counters_[r].consumed.load(std::memory_order_acquire); };
  wait_for_ranks(topology_.local_size(), call, value, topology_.node_count == 1);
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
  const auto value = [&](int r) { return post_of(r).call.load(std::memory_order_acquire); };
  wait_for_ranks(topology_.local_size(), call_, value, true);
  const Post& mine = post_of(topology_.local_rank);
  for (int r = 0; r < topology_.local_size(); ++r) {
    const Post& other = post_of(r);
    if (other.signature == mine.signature && other.place == mine.place) continue;
    consumed(call_);
    if (topology_.node_count > 1 && topology_.local_rank == 0) compare_signatures(kDisagreement, nullptr, 0);
    if (other.signature != mine.signature) throw PlanMismatch("Ranks disagree on what to communicate.");
    throw PlanMismatch("Ranks disagree on what to communicate: rank " + std::to_string(topology_.rank) + " and rank " +
                       std::to_string(topology_.local_ranks()[at(r)]) +
                       " gave different arrays, or different parts, of keras_hpc.empty.");
  }
}

// ---- between nodes

void Meeting::across_nodes(Algorithm algorithm, size_t count, DType dtype, DType wire, Op op, OnSegment before,
                           OnSegment after) {
  if (count == 0) return;
  const size_t nbytes =
      std::min(SegmentedAllreduce::nbytes(algorithm, at(topology_.node_count)), count * size_of(dtype));
  if (segments_bytes_ < nbytes) {
    segments_ = message_memory(nbytes);
    segments_bytes_ = nbytes;
  }
  SegmentedAllreduce allreduce(
      *channel_, {topology_.peers_of_slice(topology_.local_rank), topology_.node, library_.get()}, kDataTag, algorithm,
      {segments_.get(), count, dtype, wire, op, segments_}, std::move(before), std::move(after));
  complete(allreduce);
}

void Meeting::call_library(void* data, size_t count, DType dtype, Op op) {
  Activity::Note note(*team_.activity, stall(nullptr));
  channel_->allreduce(data, count, dtype, op);
  note.resolve();
}

int64_t Meeting::compare_signatures(int64_t signature, const void* data, size_t nbytes) {
  if (topology_.node_count > kFewNodes) {
    const auto memory = message_memory(2 * sizeof(int64_t));
    auto* extremes = reinterpret_cast<int64_t*>(memory.get());
    extremes[0] = signature;
    extremes[1] = -signature;
    Schedules schedules({topology_.peers_of_slice(0), topology_.node});
    Allreduce allreduce(*channel_, schedules, kWordTag);
    allreduce.begin(Algorithm::recursive_doubling, {extremes, 2, DType::int64, DType::int64, Op::max, memory});
    complete(allreduce);
    return extremes[0] != signature ? extremes[0] : -extremes[1];
  }
  const auto me = at(topology_.node);
  const std::vector<int> peers = topology_.peers_of_slice(0);
  if (!messages_) messages_ = message_memory(peers.size() * kMessageBytes);
  std::memcpy(message(me), &signature, sizeof signature);
  if (nbytes > 0) std::memcpy(message(me) + sizeof signature, data, nbytes);
  Pending pending(messages_);
  for (size_t i = 0; i < peers.size(); ++i) {
    if (i == me) continue;
    pending.add(channel_->receive(message(i), kMessageBytes, peers[i], kWordTag), peers[i]);
    pending.add(channel_->send(message(me), sizeof signature + nbytes, peers[i], kWordTag), peers[i]);
  }
  poll([&] { return pending.test(); }, [&] { return pending.peer(); });
  for (size_t i = 0; i < peers.size(); ++i) {
    int64_t theirs = 0;
    std::memcpy(&theirs, message(i), sizeof theirs);
    if (theirs != signature) return theirs;
  }
  return signature;
}

std::byte* Meeting::message(size_t node) const {
  return messages_.get() + node * kMessageBytes;
}

const std::byte* Meeting::posted_by_node(int node) const {
  return message(at(node)) + sizeof(int64_t);
}

void Meeting::compare_nodes(const void* data, size_t nbytes) {
  if (topology_.node_count == 1) return;
  const int64_t mine = post_of(topology_.local_rank).signature;
  Counters& first = counters_[0];
  if (topology_.local_rank == 0) {
    if (compare_signatures(mine, data, nbytes) != mine) first.refused_call.store(call_, std::memory_order_relaxed);
    first.compared.store(call_, std::memory_order_release);
    unannounced_ = true;
  } else {
    wait_for_ranks(1, call_, [&](int) { return first.compared.load(std::memory_order_acquire); }, false);
  }
  if (first.refused_call.load(std::memory_order_relaxed) != call_) return;
  consumed(call_);
  throw PlanMismatch("Ranks disagree on what to communicate, on this node and on another.");
}

std::vector<double> Meeting::gather(const std::vector<double>& mine) {
  struct Message {
    std::vector<double> mine, all;
  };
  const auto message = std::make_shared<Message>(Message{mine, std::vector<double>(mine.size() * at(topology_.size))});
  Pending pending(message);
  pending.add(channel_->allgather(message->mine.data(), message->all.data(),
                                  std::vector<size_t>(at(topology_.size), mine.size() * sizeof(double))));
  poll([&] { return pending.test(); }, [&] { return -1; });
  return message->all;
}

}  // namespace keras_hpc
