// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a team meet for a blocking call: each says in shared memory what it wants, and waits until all of
// its node have. So a rank that asks for something else is an error on all, and a rank that never comes is named.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/segmented.hpp"
#include "engine/context.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

class Meeting {
 public:
  // Collective.
  Meeting(const TeamContext& team, Transport& transport, Channel& control);
  ~Meeting();

  // Begins a call: this rank wants what `signature` says (not negative), of the data at `place`. Small data go along.
  // `label` names a call that is no allreduce, for who waits in it; it lives until the next call.
  void post(int64_t signature, int64_t place, const void* data = nullptr, size_t nbytes = 0,
            const std::string* label = nullptr);
  // Waits until all ranks of the node have posted; throws PlanMismatch unless all want the same.
  void meet();
  // After meet(): throws PlanMismatch unless other nodes want the same. The first rank's data go along, with few nodes.
  void compare_nodes(const void* data = nullptr, size_t nbytes = 0);
  // Number of the current call, from 1.
  uint64_t call() const { return call_; }
  // What a rank of this node has posted in this call; the first rank of another node in compare_nodes().
  std::byte* posted(int local_rank, size_t nbytes) const;
  const std::byte* posted_by_node(int node) const;

  // What this rank tells the others of its node, and waits for. A call is its number.
  void hand_out(uint64_t call);  // its slice of the result may be read
  void wait_until_handed_out(int owners, uint64_t call);
  void consumed(uint64_t call);  // it has copied out what others handed out
  void wait_until_consumed(uint64_t call);
  // Whoever sleeps for something of this rank. To be called before this rank works for long, and at a call's end.
  void wake_others();

  // Between the owners of the same slice on all nodes, to be called by each of them.
  void across_nodes(Algorithm algorithm, size_t count, DType dtype, DType wire, Op op, OnSegment before,
                    OnSegment after);
  // The MPI library's own allreduce. It knows no time limit.
  void call_library(void* data, size_t count, DType dtype, Op op);
  // Collective. The values of all ranks.
  std::vector<double> gather(const std::vector<double>& mine);
  Channel& channel() const { return *channel_; }
  bool has_library() const { return library_ != nullptr; }
  size_t segment_bytes() const { return segment_->nbytes(); }

  static constexpr size_t kSlotBytes = size_t{64} << 10;
  // Up to this many nodes, each sends what it has to all others at once.
  static constexpr int kFewNodes = 8;

 private:
  struct Post;      // what a rank wants, in the segment
  struct Counters;  // of one rank, in the segment

  Post& post_of(int local_rank) const;  // of the current call
  class Waiting;

  // The first ranks of all nodes tell each other what they want, and their data. Returns what another one wants, if it
  // is something else.
  int64_t compare_signatures(int64_t signature, const void* data, size_t nbytes);
  std::byte* message(size_t node) const;

  // `certain`: who has not done it is late; else it may wait for another node.
  template <class Value>
  void wait_for_ranks(int ranks, uint64_t target, Value&& value, bool certain);
  template <class Ready, class Peer>
  void poll(Ready&& ready, Peer&& peer);
  template <class Operation>
  void complete(Operation& operation);  // an allreduce between nodes
  Stall stall(std::function<std::vector<int>()> missing) const;
  std::string name() const;  // of the current call
  std::string late_text() const;

  const TeamContext& team_;
  const Topology& topology_;
  const std::string* label_ = nullptr;  // of the current call, if it is no allreduce
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<Channel> library_;  // across nodes, where there is an MPI library
  std::unique_ptr<Segment> segment_;
  Counters* counters_ = nullptr;  // [local rank]
  std::byte* posts_ = nullptr;    // [2][local rank]
  uint64_t call_ = 0;
  bool unannounced_ = false;  // something that others may sleep for
  // The network works on these.
  std::shared_ptr<std::byte> messages_;  // [node]
  std::shared_ptr<std::byte> segments_;
  size_t segments_bytes_ = 0;
};

}  // namespace keras_hpc
