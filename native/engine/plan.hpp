// SPDX-License-Identifier: Apache-2.0
// A plan: a fixed list of tensors that a team reduces together, again and again, and the memory to do it.
//
// The ranks of a node share one segment per plan. For bucket b, cut into slices j = 0..owners-1 (Topology::owners):
//   start    rank r copies every slice that it does not own into the segment, where the owner finds it, and raises its
//            counter `packed`. Its own slice is not copied.
//   reduce   once all ranks of the node have packed the bucket, the owner adds up its slice in rank order, its own part
//            straight from the tensor; writes the result into the segment and into its own tensor; across nodes, an
//            allreduce between the owners of the slice comes in between; then it raises its counter `reduced`.
//   wait     rank r copies the slices that others reduced from the segment into its tensor; after the last tensor it
//            raises `consumed`, and the memory is free for the next execution.
// A plan whose tensors live in the segment themselves copies nothing: the owner adds up its slice of all ranks' tensors
// where they are, and writes the result into all of them.
// Each rank moves (L-1)/L of its bytes in and out, L ranks per node, and the segment takes (L-1)/L of the bytes per
// rank (all of them where L = 1): never more than one extra copy of the tensors. All counters only grow, so nothing is
// ever reset, and no bucket needs more than two synchronisations.
#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/allreduce.hpp"
#include "engine/context.hpp"
#include "engine/layout.hpp"
#include "engine/totals.hpp"
#include "engine/weights.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

// How far this rank is with a plan.
struct PlanProgress {
  std::string what;              // its number and name
  uint64_t step = 0;             // the last that it has begun
  std::vector<int> not_started;  // tensors of this step; none once all of it is over
};

class Plan {
 public:
  // Says how slices of so many bytes go from node to node.
  using AlgorithmFor = std::function<Algorithm(size_t nbytes)>;

  // Collective on the team, with the same arguments on every rank. Between nodes, float32 travels as `wire`. With
  // `in_segment` the tensors live in memory(), and start takes no other.
  Plan(const TeamContext& team, int number, std::string name, std::vector<TensorSpec> tensors, Op op, bool weighted,
       int lanes, std::optional<DType> wire, bool in_segment, const AlgorithmFor& algorithm_for, Transport& transport,
       Channel& control);

  // One execution: start of every tensor, then, once is_reduced, finish of every tensor. Thread-safe.
  // True if a bucket is complete with it.
  bool start(int tensor, void* data, double weight);
  void check_started(int tensor) const;
  bool is_reduced(int tensor) const;
  void finish(int tensor);

  // Does what can be done now on one lane: reduces buckets that all ranks of the node have packed, drives the network.
  // One thread at a time per lane. True if anything was done.
  bool advance(int lane, Channel& channel);
  bool uses_network(int lane) const { return lanes_[static_cast<size_t>(lane)].in_flight > 0; }

  const std::string& name() const { return name_; }
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  const Layout& layout() const { return layout_; }
  uint64_t step() const { return step_.load(std::memory_order_relaxed); }
  const std::vector<Algorithm>& algorithms() const { return algorithms_; }
  // Of this rank's tensors, at their places in the layout, if they live in the segment; it may outlive the plan.
  std::shared_ptr<std::byte> memory() const;
  size_t segment_bytes() const { return segment_ ? segment_->nbytes() : 0; }
  // Ranks that have not done their part of this tensor, as far as this rank can see.
  std::vector<int> missing_ranks(int tensor) const;
  std::string describe(int tensor) const;
  std::string what() const { return "plan " + std::to_string(number_) + " " + name_; }
  PlanProgress progress() const;
  PlanTotals totals() const { return totals_.read(); }  // of executions that are over
  // A rank that had to wait has seen the end itself; otherwise it only knows of its own slices.
  void note_reduced(Clock::time_point now) { reduced_at_.store(now, std::memory_order_relaxed); }

 private:
  struct Shared;  // counters of one local rank, in the segment
  struct Counter;
  struct InFlight {
    int bucket;
    std::unique_ptr<Allreduce> operation;  // null: finished
    Clock::time_point begin;
  };
  // Progress of one lane. Only the thread that holds the lane's lock touches it.
  struct LaneState {
    uint64_t next = 0;       // buckets whose reduction has begun, over all executions
    uint64_t published = 0;  // buckets whose result is visible to the node
    std::deque<InFlight> operations;
    std::atomic<int> in_flight{0};
    uint64_t headers_step = 0;  // the execution whose weights are known
    std::vector<double> headers;
    std::unique_ptr<Allreduce> header_exchange;
    Weights weights;
  };

  void begin(double weight);
  bool pack(int tensor);
  void bucket_is_packed(int bucket);
  bool know_weights(LaneState& lane, uint64_t step, Channel& channel);
  void reduce(const Bucket& bucket, const LaneState& lane);
  void copy_result(const Bucket& bucket, const Range& slice);
  void publish(int lane);
  std::byte* slot(int owner, int contributor) const;
  std::byte* memory_of(int local_rank) const;
  std::byte* own_result() const;  // where this rank, as an owner, leaves sums
  uint64_t target(const Bucket& bucket) const;
  int network_tag(int place) const;

  const TeamContext& team_;
  const Topology& topology_;
  const int number_;
  const std::string name_;
  const std::vector<TensorSpec> tensors_;
  const Op op_;
  const bool weighted_;
  const std::optional<DType> wire_;
  Layout layout_;
  size_t tensor_bytes_ = 0;            // without the gaps between tensors
  std::vector<Algorithm> algorithms_;  // [bucket] of its slices between nodes
  const bool in_segment_;
  std::shared_ptr<Segment> segment_;
  Shared* shared_ = nullptr;    // [local rank]
  Counter* packed_ = nullptr;   // [lane][local rank]
  Counter* reduced_ = nullptr;  // [lane][local rank]
  std::byte* slots_ = nullptr;  // [slot][bytes], or the tensors of each local rank
  bool streaming_ = false;

  std::mutex mutex_;  // of the beginning of an execution
  std::atomic<bool> active_{false};
  std::atomic<uint64_t> step_{0};
  std::atomic<Clock::time_point> began_at_{Clock::time_point()};
  std::atomic<Clock::time_point> reduced_at_{Clock::time_point()};
  std::atomic<int> finished_{0};
  Totals totals_;
  std::vector<std::byte*> data_;
  enum class State : char { idle, started, finished };
  std::vector<std::atomic<State>> states_;
  std::vector<int> tensors_in_bucket_;
  std::vector<std::atomic<int>> unpacked_tensors_;  // [bucket] tensors not packed yet
  std::mutex pack_mutex_;
  std::vector<char> is_packed_;       // [bucket]
  std::vector<size_t> packed_front_;  // [lane] buckets packed without a gap
  std::vector<LaneState> lanes_;
};

}  // namespace keras_hpc
