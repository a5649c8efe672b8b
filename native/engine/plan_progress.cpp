// SPDX-License-Identifier: Apache-2.0
// What a plan says of itself to who waits for it: whom it waits for, what it is, how far it is.
#include <algorithm>

#include "common/index.hpp"
#include "engine/plan.hpp"

namespace keras_hpc {

// A lane takes its buckets in order: whoever has not done its part of the first one that is not back here holds it up.
std::vector<int> Plan::missing_ranks(int tensor) const {
  std::vector<int> missing;
  const auto [first, last] = layout_.buckets_of(tensor);
  const auto collect = [&](Stage stage, int lane, int ranks, uint64_t expected) {
    for (int r = 0; r < ranks; ++r)
      if (memory_->count(stage, lane, r) < expected) missing.push_back(topology_.local_ranks()[at(r)]);
    return !missing.empty();
  };
  for (int b = first; b < last; ++b) {
    const Bucket& bucket = layout_.buckets()[at(b)];
    const int lane = bucket.lane;
    const uint64_t next = memory_->count(Stage::copied, lane, topology_.local_rank) + 1;
    if (next > target(bucket)) continue;
    const uint64_t places = memory_->places(lane);
    if (!in_segment_ && next > places && collect(Stage::copied, lane, topology_.local_size(), next - places))
      return missing;
    if (collect(Stage::packed, lane, topology_.local_size(), next)) return missing;
    if (topology_.node_count == 1 && collect(Stage::reduced, lane, owners_, next)) return missing;
  }
  for (const auto& ranks : topology_.ranks_of_node)  // this node is complete: somebody on another one is late
    if (&ranks != &topology_.local_ranks()) missing.insert(missing.end(), ranks.begin(), ranks.end());
  return missing;
}

bool Plan::owes_slice(int tensor, int rank) const {
  const auto& local = topology_.local_ranks();
  const auto owner = std::find(local.begin(), local.end(), rank) - local.begin();
  if (topology_.node_count == 1 || owner >= owners_) return false;
  const auto [first, last] = layout_.buckets_of(tensor);
  return std::any_of(layout_.buckets().begin() + first, layout_.buckets().begin() + last, [&](const Bucket& bucket) {
    return memory_->count(Stage::reduced, bucket.lane, static_cast<int>(owner)) < target(bucket);
  });
}

std::string Plan::describe(int tensor) const {
  return "Tensor '" + tensors_[at(tensor)].name + "' of plan '" + name_ + "' (team " + std::to_string(team_.number) +
         ", step " + std::to_string(step()) + ", rank " + std::to_string(topology_.rank) + ")";
}

PlanProgress Plan::progress() const {
  PlanProgress progress{what(), step(), {}};
  for (int t = 0; is_active() && t < layout_.tensor_count(); ++t)
    if (states_[at(t)] == State::idle) progress.not_started.push_back(t);
  return progress;
}

}  // namespace keras_hpc
