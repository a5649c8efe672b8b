// SPDX-License-Identifier: Apache-2.0
#include "engine/plan_memory.hpp"

#include <algorithm>
#include <atomic>

#include "common/index.hpp"
#include "common/pages.hpp"
#include "engine/area.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kStages = 3;
// Few enough for the processor's caches, and more than a lane has on the network, so that there are others to be copied
// meanwhile.
constexpr size_t kPlaces = 4, kPlacesAcrossNodes = 8;
// Bytes of all ranks together up to which each rank adds up a bucket itself. It reads more than an owner does, and
// waits once and not twice.
constexpr size_t kSmallBytes = 64 << 10;

}  // namespace

struct alignas(128) PlanMemory::Shared {
  double weights[2];
};

struct alignas(64) PlanMemory::Counter {
  std::atomic<uint64_t> value;
};

PlanMemory::PlanMemory(const TeamContext& team, const Layout& layout, int owners, int lanes, bool in_segment,
                       Transport& transport, Channel& control)
    : team_(team),
      topology_(*team.topology),
      layout_(layout),
      owners_(owners),
      in_segment_(in_segment),
      small_bytes_(topology_.node_count == 1 && topology_.local_size() > 1 ? kSmallBytes / at(topology_.local_size())
                                                                           : 0) {
  const auto local = at(topology_.local_size());
  size_t places = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    lanes_.push_back({places, std::min(topology_.node_count == 1 ? kPlaces : kPlacesAcrossNodes,
                                       layout.buckets_of_lane(lane).size())});
    places += lanes_.back().places;
  }
  size_t largest = 0, largest_small = 0;
  for (const Bucket& bucket : layout.buckets()) {
    size_t& most = is_small(bucket) ? largest_small : largest;
    most = std::max(most, bucket.end - bucket.begin);
  }
  slot_stride_ = Area::stride_for(in_segment ? 0 : largest);
  small_stride_ = Area::stride_for(largest_small);
  place_bytes_ = std::max(std::max<size_t>(1, local - 1) * slot_stride_, local * small_stride_);
  const size_t control_bytes = local * sizeof(Shared) + kStages * at(lanes) * local * sizeof(Counter);
  const size_t before_places = whole_pages(control_bytes);
  const size_t before_tensors = whole_pages(before_places + places * place_bytes_);
  segment_ = transport.open_segment(control, before_tensors, in_segment ? Area::stride_for(layout.nbytes()) : 0);
  shared_ = reinterpret_cast<Shared*>(segment_->data());
  counters_ = reinterpret_cast<Counter*>(shared_ + local);
  places_ = segment_->data() + before_places;
  tensors_ = segment_->data() + before_tensors;
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
  note(stage, lane, value);
  if (stage == Stage::copied) {
    team_.callers[topology_.local_rank].wake();
    if (*team_.asynchronous_waits > 0) team_.my_bell().wake();
  }
  if (lowest(stage, lane, stage == Stage::reduced ? owners_ : local) < value) return;
  for (int r = 0; r < (stage == Stage::packed ? owners_ : local); ++r) {
    // That all have copied matters to those only that wait for a place.
    const auto waits = [&](uint64_t packed) { return packed + 1 >= value + places(lane) && needs_place(lane, packed); };
    if (stage != Stage::copied || waits(count(Stage::packed, lane, r))) team_.wake(r);
  }
}

void PlanMemory::note(Stage stage, int lane, uint64_t value) {
  counter(stage, lane, topology_.local_rank).value.store(value, std::memory_order_seq_cst);
}

std::byte* PlanMemory::place(const Turn& turn) const {
  const Lane& lane = lanes_[at(turn.bucket.lane)];
  return places_ + (lane.first + turn.number % lane.places) * place_bytes_;
}

std::byte* PlanMemory::shown(const Turn& turn, int local_rank) const {
  return place(turn) + at(local_rank) * small_stride_;
}

// What contributor `r` sends to `owner` lies in slot (r - owner - 1) mod L of the bucket's place.
std::byte* PlanMemory::sent(const Turn& turn, int owner, int contributor) const {
  if (in_segment_) return tensors_of(contributor) + turn.bucket.begin;
  const int local = topology_.local_size();
  const size_t slot = local > 1 ? at((contributor - owner - 1 + local) % local) : 0;
  return place(turn) + slot * slot_stride_;
}

// It overwrites slot 0.
std::byte* PlanMemory::result(const Turn& turn, int owner) const {
  return sent(turn, owner, in_segment_ ? owner : (owner + 1) % topology_.local_size());
}

std::byte* PlanMemory::tensors_of(int local_rank) const {
  return tensors_ + at(local_rank) * Area::stride_for(layout_.nbytes());
}

double& PlanMemory::weight_of(int local_rank, uint64_t step) const {
  return shared_[local_rank].weights[step % 2];
}

}  // namespace keras_hpc
