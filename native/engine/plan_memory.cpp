// SPDX-License-Identifier: Apache-2.0
#include "engine/plan_memory.hpp"

#include <algorithm>
#include <atomic>

#include "common/index.hpp"
#include "engine/area.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStages = 3;
// Few enough for the processor's caches, and more than a lane has on the network, so that there are others to be copied
// meanwhile.
constexpr size_t kPlaces = 4, kPlacesAcrossNodes = 8;

}  // namespace

struct alignas(128) PlanMemory::Shared {
  double weight;
};

struct alignas(64) PlanMemory::Counter {
  std::atomic<uint64_t> value;
};

PlanMemory::PlanMemory(const TeamContext& team, const Layout& layout, int lanes, bool in_segment, Transport& transport,
                       Channel& control)
    : team_(team), topology_(*team.topology), layout_(layout), in_segment_(in_segment) {
  const auto local = at(topology_.local_size());
  size_t places = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    lanes_.push_back({places, std::min(topology_.node_count == 1 ? kPlaces : kPlacesAcrossNodes,
                                       layout.buckets_of_lane(lane).size())});
    places += lanes_.back().places;
  }
  size_t largest = 0;
  for (const Bucket& bucket : layout.buckets()) largest = std::max(largest, bucket.end - bucket.begin);
  slots_per_place_ = std::max<size_t>(1, local - 1);
  slot_stride_ = Area::stride_for(largest);
  const size_t control_bytes = local * sizeof(Shared) + kStages * at(lanes) * local * sizeof(Counter);
  const size_t before_data = (control_bytes + kPage - 1) / kPage * kPage;
  const size_t data_bytes =
      in_segment ? local * Area::stride_for(layout.nbytes()) : places * slots_per_place_ * slot_stride_;
  segment_ = transport.open_segment(control, before_data + data_bytes, in_segment ? before_data : SIZE_MAX);
  shared_ = reinterpret_cast<Shared*>(segment_->data());
  counters_ = reinterpret_cast<Counter*>(shared_ + local);
  data_ = segment_->data() + before_data;
}

Turn PlanMemory::turn(int lane, uint64_t number) const {
  const auto& buckets = layout_.buckets_of_lane(lane);
  const int index = buckets[number % buckets.size()];
  return {number, index, layout_.buckets()[at(index)]};
}

PlanMemory::Counter& PlanMemory::counter(Stage stage, int lane, int local_rank) const {
  return counters_[(static_cast<size_t>(stage) * lanes_.size() + at(lane)) * at(topology_.local_size()) +
                   at(local_rank)];
}

uint64_t PlanMemory::count(Stage stage, int lane, int local_rank) const {
  return counter(stage, lane, local_rank).value.load(std::memory_order_seq_cst);
}

uint64_t PlanMemory::lowest(Stage stage, int lane, int ranks) const {
  uint64_t lowest = UINT64_MAX;
  for (int r = 0; r < ranks; ++r) lowest = std::min(lowest, count(stage, lane, r));
  return lowest;
}

// What the others wait for is that all have arrived: the last one wakes them, once. Of several that arrive at the same
// time at least one finds all others there, because these stores and loads are sequentially consistent.
void PlanMemory::raise(Stage stage, int lane, uint64_t value) {
  const int local = topology_.local_size();
  counter(stage, lane, topology_.local_rank).value.store(value, std::memory_order_seq_cst);
  if (stage == Stage::copied) {
    team_.callers[topology_.local_rank].wake();
    if (*team_.asynchronous_waits > 0) team_.my_bell().wake();
  }
  if (lowest(stage, lane, stage == Stage::reduced ? topology_.owners : local) < value) return;
  for (int r = 0; r < (stage == Stage::packed ? topology_.owners : local); ++r) {
    // That all have copied matters to those only that wait for a place.
    const bool waits = !in_segment_ && count(Stage::packed, lane, r) + 1 >= value + places(lane);
    if (stage != Stage::copied || waits) team_.wake(r);
  }
}

// What contributor `r` sends to `owner` lies in slot (r - owner - 1) mod L of the bucket's place.
std::byte* PlanMemory::sent(const Turn& turn, int owner, int contributor) const {
  if (in_segment_) return tensors_of(contributor) + turn.bucket.begin;
  const Lane& lane = lanes_[at(turn.bucket.lane)];
  const int local = topology_.local_size();
  const size_t slot = local > 1 ? at((contributor - owner - 1 + local) % local) : 0;
  return data_ + ((lane.first + turn.number % lane.places) * slots_per_place_ + slot) * slot_stride_;
}

// It overwrites slot 0.
std::byte* PlanMemory::result(const Turn& turn, int owner) const {
  return sent(turn, owner, in_segment_ ? owner : (owner + 1) % topology_.local_size());
}

std::byte* PlanMemory::tensors_of(int local_rank) const {
  return data_ + at(local_rank) * Area::stride_for(layout_.nbytes());
}

double& PlanMemory::weight_of(int local_rank) const {
  return shared_[local_rank].weight;
}

}  // namespace keras_hpc
