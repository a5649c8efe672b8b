// SPDX-License-Identifier: Apache-2.0
// How the ranks of a node add up a plan's tensors.
#include <algorithm>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/plan.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kFewBytesOfSlice = 16 << 10;

}  // namespace

void Plan::check_tree(const PlanOptions& options) const {
  const bool fits = std::all_of(tensors_.begin(), tensors_.end(), [](const TensorSpec& tensor) {
    return tensor.dtype == DType::float32 || tensor.dtype == DType::float64;
  });
  if (options.op != Op::sum || options.wire || !options.givers.empty() || !options.takers.empty() || !fits ||
      !topology_.nodes_are_branches())
    throw Error(
        "Expected a sum of float32 or float64 that all ranks give and need, and nodes with branches of the tree, "
        "for '" +
        name_ + "'.");
}

// Whether the weight travels in the messages of this bucket, the first of an execution, and not in one of its own: for
// few bytes, each message counts. It lies where the slice of another owner would.
bool Plan::carries_weight(const Turn& turn) const {
  const Bucket& bucket = turn.bucket;
  const bool is_rounded = wire_ && bucket.dtype == DType::float32;
  return divides_late_ && bucket.number == 0 && owners_ == 1 && bucket.end - bucket.begin <= kFewBytesOfSlice &&
         algorithms_[at(turn.index)] != Algorithm::library && !is_rounded && flow_ == Flow::to_all;
}

// How much the ranks of this node count in an execution. The sum over all nodes comes with its first bucket or in one
// small message, and only float16 waits for it.
bool Plan::know_weights(const Turn& turn, LaneState& lane) {
  const uint64_t step = turn.number / layout_.buckets_of_lane(lane.number).size() + 1;
  const bool asks_others = weighted_ && topology_.node_count > 1;
  if (lane.weights_step != step) {
    lane.of_rank.clear();
    lane.weight_of_node = 0;
    for (int r = 0; r < topology_.local_size(); ++r) {
      lane.of_rank.push_back(weighted_ || in_tree_ ? memory_->weight_of(r, step) : 1.0);
      lane.weight_of_node += lane.of_rank.back();
    }
    lane.weights_step = step;
    if (asks_others && !carries_weight(turn)) lane.network->begin_weight(lane.weight_of_node);
    const double of_all = weighted_ ? lane.weight_of_node : topology_.size;
    find_weights(lane.of_rank, op_ == Op::mean && !divides_late_ ? of_all : 1.0, lane.weights);
    if (in_tree_)
      lane.weights.weighted = true;  // also where all are equal: values are multiplied before they are added
  }
  if (!asks_others || divides_late_) return true;
  if (!lane.network->knows_weight()) return false;
  find_weights(lane.of_rank, lane.network->weight(), lane.weights);
  return true;
}

// Adds up this rank's slice, or all of a small bucket.
void Plan::reduce(const Turn& turn, LaneState& lane) {
  const int me = topology_.local_rank;
  const bool alone = topology_.node_count == 1;
  const bool small = memory_->is_small(turn.bucket);
  const bool for_me = alone && !small && turn.bucket.owner == me;  // nobody else needs it
  for_parts(turn, small ? whole(turn) : slice(turn, me), [&](int t, std::byte* mine, size_t offset, size_t nbytes) {
    if (!givers_.empty()) {
      gather(turn, t, mine, offset, nbytes, lane);
      return;
    }
    lane.sources.clear();
    lane.outs.clear();
    for (int r = 0; r < topology_.local_size(); ++r) {
      const double factor = lane.weights.weighted ? lane.weights.factors[at(r)] : 1.0;
      std::byte* theirs = r == me ? mine : (small ? memory_->shown(turn, r) : memory_->sent(turn, me, r)) + offset;
      if (in_segment_ && alone && !small && !for_me && r != me) lane.outs.push_back(theirs);
      if (factor == 0.0 && !in_tree_) continue;  // has no samples in this step; its values may be NaN
      lane.sources.push_back({theirs, factor});
    }
    // Across nodes, first only where the network takes it from.
    if (!small && !for_me && (!in_segment_ || !alone)) lane.outs.push_back(sum_of(turn, lane) + offset);
    if (alone) lane.outs.push_back(mine);
    const size_t count = nbytes / size_of(turn.bucket.dtype);
    if (in_tree_)
      sum_in_tree(turn.bucket.dtype, lane.sources.data(), lane.sources.size(), lane.outs.data(), lane.outs.size(),
                  count);
    else
      keras_hpc::reduce(turn.bucket.dtype, op_, lane.sources.data(), lane.sources.size(), lane.weights.weighted,
                        lane.weights.scale, lane.outs.data(), lane.outs.size(), count);
  });
}

std::byte* Plan::sum_of(const Turn& turn, const LaneState& lane) const {
  if (lane.sums == nullptr) return memory_->result(turn, topology_.local_rank);
  return lane.sums.get() + turn.number % LaneNetwork::kInFlight * sum_stride();
}

}  // namespace keras_hpc
