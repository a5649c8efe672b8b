// SPDX-License-Identifier: Apache-2.0
// A plan: a fixed list of tensors that a team reduces together, again and again, and the memory to do it.
//
// The ranks of a node share one segment per plan, in which some buckets have a place at the same time. A lane takes its
// buckets in order, over all executions, and with each, cut into slices j = 0..owners-1 (Topology::owners):
//   pack     once its tensors have been started and its place is free, rank r copies every slice that it does not own
//            into the segment, where the owner finds it, and raises its counter `packed`. Its own slice is not copied.
//   reduce   once all ranks of the node have packed it, the owner adds up its slice in rank order, its own part
//            straight from the tensor; writes the result into the segment and into its own tensor; across nodes, an
//            allreduce between the owners of the slice comes in between; then it raises its counter `reduced`.
//   copy     once all owners have, rank r copies the slices that others reduced from the segment into its tensors and
//            raises `copied`; when all ranks have, the place is free again.
// So what goes from rank to rank stays in the processor's caches, however large the tensors are.
// A small bucket has no owners: every rank packs all of it and reduces all of it for itself, so ranks wait for each
// other once and not twice. A plan whose tensors live in the segment copies nothing but what was somewhere else: the
// owner adds up its slice of all ranks' tensors where they are, and writes the result into all of them. Each rank moves
// (L-1)/L of its bytes in and out, L ranks per node. All counters only grow, so nothing is ever reset.
// Where a rank alone needs or gives something (PlanOptions), it owns buckets of that alone on a single node: it adds up
// what it needs into its own tensor, and nobody copies; or it shows what it gives, and the others copy it. Across nodes
// slices are as ever, but nothing travels that nobody needs (algorithms/partial.hpp), and each rank copies what it
// needs.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/allreduce.hpp"
#include "algorithms/kernels.hpp"
#include "engine/area.hpp"
#include "engine/context.hpp"
#include "engine/lane_network.hpp"
#include "engine/layout.hpp"
#include "engine/plan_memory.hpp"
#include "engine/portions.hpp"
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

struct PlanOptions {
  Op op = Op::mean;
  bool weighted = false;           // a mean: each rank's values count as often as its weight says
  std::optional<DType> wire = {};  // 16 bits to which float32 is rounded between nodes
  bool in_segment = false;         // the tensors live in Plan::memory(), to where start copies others
  size_t bucket_bytes = 0;         // at most; 0: what fits the nodes and their ranks
  // A sum of each rank's values times its weight, in the order of a tree over the ranks (algorithms/kernels.hpp), so
  // that its bits do not depend on nodes, of which each has a branch. float32 and float64.
  bool in_tree = false;
  // Of a sum: the rank that alone gives each tensor, so that all get it as it is. Empty: every rank gives each.
  std::vector<int> givers = {};
  // Of a reduction: the ranks that alone need each tensor's elements. Others find any numbers there. Empty: all need
  // all.
  std::vector<Shares> takers = {};
};

class Plan {
 public:
  // Says how slices of so many bytes go from node to node.
  using AlgorithmFor = std::function<Algorithm(size_t nbytes)>;

  // Collective on the team, with the same arguments on every rank.
  Plan(const TeamContext& team, int number, std::string name, std::vector<TensorSpec> tensors,
       const PlanOptions& options, int lanes, const AlgorithmFor& algorithm_for, Transport& transport,
       Channel& control);

  // One execution: start of every tensor, then, once is_complete, release of every tensor. Thread-safe.
  // What can be packed because all its tensors have been started now: a small bucket, or more.
  enum class Started { nothing, small_bucket, bucket };
  Started start(int tensor, void* data, double weight);
  void check_started(int tensor) const;
  bool is_active() const { return phase_ != Phase::over; }  // an execution has begun and is not over
  bool is_complete(int tensor) const;                       // its result is where it was started
  int first_incomplete(int from) const;                     // the number of tensors: none
  void release(int tensor);                                 // it is the caller's again
  bool only_reads(int tensor) const;                        // this rank gives it to others of its node

  // Does what can be done now on one lane. One thread at a time per lane. True if anything was done.
  bool advance(int lane, Channel& channel);
  // For who holds the lane: whether a bucket is started and not back yet, and whether one is on its way between nodes.
  bool is_under_way(int lane) const;
  bool uses_network(int lane) const;
  int peer_awaited(int lane) const;  // likewise: on another node; -1: none, or it is not known
  bool is_through(int lane) const;   // likewise: of this execution nothing is left to do

  const std::string& name() const { return name_; }
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  const Layout& layout() const { return layout_; }
  Op op() const { return op_; }
  bool is_weighted() const { return weighted_; }
  std::optional<DType> wire() const { return wire_; }
  uint64_t step() const { return step_.load(std::memory_order_relaxed); }
  const std::vector<Algorithm>& algorithms() const { return algorithms_; }
  // Of this rank's tensors, at their places in the layout, if they live in the segment; it may outlive the plan.
  std::shared_ptr<std::byte> memory() const;
  size_t segment_bytes() const { return memory_ ? memory_->segment()->nbytes() : 0; }
  // Ranks that have not done their part of this tensor, as far as this rank can see.
  std::vector<int> missing_ranks(int tensor) const;
  // Across nodes: whether a rank of this node has not got its slice of this tensor from the others yet, or not sent it.
  bool owes_slice(int tensor, int rank) const;
  std::string describe(int tensor) const;
  std::string what() const { return "plan " + std::to_string(number_) + " " + name_; }
  PlanProgress progress() const;
  PlanTotals totals() const { return totals_.read(); }  // of executions that are over

 private:
  // Progress of one lane. Only the thread that holds the lane's lock touches it.
  struct LaneState {
    int number = 0;
    // How many buckets this rank has taken through a stage, over all executions.
    uint64_t packed = 0;
    uint64_t reduced = 0;    // across nodes: handed to the network
    uint64_t published = 0;  // their results are visible to the node
    uint64_t copied = 0;
    uint64_t weights_step = 0;  // the execution whose weights have been looked up
    double weight_of_node = 0;  // in it
    Weights weights;
    // Operations of a communicator begin in the same order on all ranks: those of a lane of one plan do.
    std::unique_ptr<Channel> mpi_channel;
    std::unique_ptr<LaneNetwork> network;  // of an owner, across nodes
    // Across nodes, where tensors live in the segment: sums on their way. The tensors are the caller's when an error
    // ends the step, and the network may still be at it.
    std::shared_ptr<std::byte> sums;
    // Of no use to another call.
    std::vector<double> of_rank;
    std::vector<Source> sources;
    std::vector<void*> outs;
  };

  enum class Phase : char { over, beginning, active };

  void check_tree(const PlanOptions& options) const;
  void begin(double weight);
  bool next_is_started(const LaneState& lane) const;
  bool pack_next(LaneState& lane);
  bool reduce_next(LaneState& lane, Channel& channel);
  bool drive_network(LaneState& lane);
  bool copy_next(LaneState& lane);
  bool know_weights(const Turn& turn, LaneState& lane);
  bool carries_weight(const Turn& turn) const;
  void reduce(const Turn& turn, LaneState& lane);
  void set_out(const Turn& turn, LaneState& lane);
  void spread(const Turn& turn, LaneState& lane);
  // Where a bucket's bytes begin, of which this rank's slice goes to other nodes.
  std::byte* sum_of(const Turn& turn, const LaneState& lane) const;
  size_t sum_stride() const { return Area::stride_for(largest_bucket_); }  // with room for the weight
  static Range whole(const Turn& turn) { return {turn.bucket.begin, turn.bucket.end}; }
  bool gives(int tensor, int local_rank) const;
  void gather(const Turn& turn, int tensor, std::byte* mine, size_t offset, size_t nbytes, LaneState& lane);
  Range slice(const Turn& turn, int owner) const;
  Partial how_between_nodes(const Range& slice, DType dtype) const;
  // Calls f(tensor, address, offset in the bucket, bytes) for each tensor's part of a range.
  template <class F>
  void for_parts(const Turn& turn, const Range& range, F&& f) const;
  // Calls f(range, local rank that alone needs it) for each portion of a range.
  template <class F>
  void for_portions(const Range& range, F&& f) const;
  std::vector<Portion>::const_iterator first_portion(size_t place) const;  // that ends behind it
  uint64_t target(const Bucket& bucket) const;  // buckets of its lane that are copied when it is
  void note_complete(Clock::time_point now) { complete_at_.store(now, std::memory_order_relaxed); }

  const TeamContext& team_;
  const Topology& topology_;
  const int number_;
  const std::string name_;
  const std::vector<TensorSpec> tensors_;
  const Op op_;
  const bool weighted_;
  const bool in_tree_;
  const std::optional<DType> wire_;
  const std::vector<int> givers_;  // [tensor], or none
  const bool divides_late_;  // values travel multiplied by the ranks' weights, and are divided by their sum at the end
  Layout layout_;
  const Flow flow_;
  const std::vector<Portion> portions_;  // where ranks do not need, or give, all
  size_t tensor_bytes_ = 0;              // without the gaps between tensors
  size_t largest_bucket_ = 0;
  // To where the framework will read it, not soon.
  void (*copy_tensor_)(void* to, const void* from, size_t nbytes) = copy_shared;
  std::vector<Algorithm> algorithms_;  // [bucket] of its slices between nodes
  const int owners_;                   // local ranks 0..owners-1 add up a slice of each bucket
  const bool in_segment_;
  std::optional<PlanMemory> memory_;  // none where one rank has the result already
  std::mutex mutex_;                  // of the beginning of an execution
  std::atomic<Phase> phase_{Phase::over};
  std::atomic<uint64_t> step_{0};
  std::atomic<Clock::time_point> began_at_{Clock::time_point()};
  std::atomic<Clock::time_point> complete_at_{Clock::time_point()};
  std::atomic<int> finished_{0};
  Totals totals_;
  std::vector<std::byte*> data_;
  enum class State : char { idle, started, finished };
  std::vector<std::atomic<State>> states_;
  std::vector<int> tensors_in_bucket_;
  std::vector<std::atomic<int>> unstarted_;  // [bucket] tensors
  std::vector<LaneState> lanes_;
};

template <class F>
void Plan::for_parts(const Turn& turn, const Range& range, F&& f) const {
  const Bucket& bucket = turn.bucket;
  for (int t = bucket.first; t <= bucket.last; ++t) {
    const Range part = layout_.part(t, range);
    if (!part.empty())
      f(t, data_[static_cast<size_t>(t)] + (part.begin - layout_.range(t).begin), part.begin - bucket.begin,
        part.size());
  }
}

template <class F>
void Plan::for_portions(const Range& range, F&& f) const {
  if (flow_ != Flow::to_takers) {
    f(range, Portion::kEverybody);
    return;
  }
  auto portion = first_portion(range.begin);
  for (; portion != portions_.end() && portion->begin < range.end; ++portion)
    f(Range{std::max(range.begin, portion->begin), std::min(range.end, portion->end)}, portion->local_rank);
}

}  // namespace keras_hpc
