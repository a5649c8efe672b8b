// SPDX-License-Identifier: Apache-2.0
// The way of a device plan from GPU to GPU by a kernel of ours, for the ranks of one node: also for those that share a
// GPU. Means have the bits of the CPU's.
//
// A step of the courier, for each bucket in turn, each stage as soon as it can be:
//   fill    once its tensors have been started, a stream copies them into the bucket
//   sum     once all ranks have filled theirs, a kernel adds up this rank's slice of all of them, and writes the sum to
//           all of them
//   back    once all ranks have done so, the bucket is copied to the tensors
// Ranks wait for each other on the host: no stream ever waits for another rank, so what a GPU was given always ends.
// The order is made by events alone, those of direct_plan.hpp and
//   filled[b]  on the stream that fills, after its copies; the courier asks for it, and tells the other ranks
//   summed[b]  on the stream that adds up, after the kernel; the same
//   end        on that stream after the last copy back; the courier asks for it
#pragma once
#include <memory>
#include <vector>

#include "device/direct_plan.hpp"
#include "device/peer_memory.hpp"
#include "device/sum_kernel.hpp"

namespace keras_hpc {

class PeerPlan final : public DirectPlan {
 public:
  // Collective on the ranks of a node, which are all. `area`: see PeerMemory. Throws Error where the device, its memory
  // or the kernel cannot be had, or where a rank has none.
  PeerPlan(Team& team, Plan& plan, int ordinal, const std::shared_ptr<Area>& area);
  ~PeerPlan() override;

  void stop() override;

 private:
  using Stage = device::PeerMemory::Stage;

  void step(Watch& watch) override;
  const char* how() const override { return "by a kernel"; }
  const char* have_not() const override { return "The node's GPUs have not"; }
  std::vector<int> missing() const override { return memory_->behind(awaited_, awaited_count_); }
  std::vector<const device::Stream*> streams() const override { return {stream_.get(), sums_.get()}; }
  void abandon() override;

  bool all_have(Stage stage, uint64_t count);
  void find_factors();
  void add_up(int number);
  device::Pointer place_of(int number, int local_rank) const {
    return memory_->of(local_rank) + begins_[static_cast<size_t>(number)];
  }

  std::vector<size_t> begins_;  // [bucket] in the memory of a rank
  std::unique_ptr<device::Stream> sums_;
  std::vector<std::unique_ptr<device::Event>> filled_, summed_;  // [bucket]
  std::unique_ptr<device::Event> end_;
  std::unique_ptr<device::SumKernel> kernel_;
  std::unique_ptr<device::PeerMemory> memory_;

  // The courier's.
  uint64_t before_ = 0;  // buckets of earlier steps
  Weights weights_;      // of this step
  Stage awaited_ = Stage::filled;
  uint64_t awaited_count_ = 0;
};

}  // namespace keras_hpc
