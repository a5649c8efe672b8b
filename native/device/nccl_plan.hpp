// SPDX-License-Identifier: Apache-2.0
// The ways of a device plan by NCCL, from GPU to GPU. Either NCCL connects all ranks, and nothing goes through the
// host: between nodes NCCL has a network of its own. Or it connects those of a node, and parts of what these have added
// up go between nodes on the engine's network (between_nodes.hpp).
//
// A step of the courier:    weigh      where ranks count with their weights, these are added up, once per step
// for each bucket in turn:  fill       once its tensors have been started, a stream of ours waits for them, and copies
//                                      them into the bucket;
//                           reduce     which it sums up over the ranks, or scatters the sums of the node
//                           copy_out   and copies the sums back: at once, or, once its sums have come from the other
//                                      nodes and all buckets have left, after it has gathered them
//
// Buckets are taken in the same order on all ranks, as NCCL needs it, whatever backward has computed first. So are the
// steps of a team's plans, one at a time: kernels of two communicators that a GPU has no room for at once would wait
// for each other for ever, if ranks began with different ones. Frameworks begin steps in one order on all ranks. An
// error ends what is under way by ncclCommAbort. The order is made by events alone, those of direct_plan.hpp and
//   summed    on our stream once the sum of the weights has come to the host; the courier asks for it
//   end       on our stream after the last copy back; the courier asks for it
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "common/turns.hpp"
#include "device/between_nodes.hpp"
#include "device/direct_plan.hpp"
#include "device/nccl.hpp"

namespace keras_hpc {

class NcclPlan final : public DirectPlan {
 public:
  // For NCCL within nodes: what reduces between them; see BetweenNodes. Null: NCCL connects all ranks.
  struct Peers {
    std::shared_ptr<Team> team;
    std::shared_ptr<Plan> parts;
  };
  // Collective on the ranks that NCCL connects, each of which has a GPU of its own. Throws Error where the device, its
  // memory or NCCL cannot be had.
  NcclPlan(Team& team, Plan& plan, int ordinal, const device::NcclId& id, const Peers& peers);
  ~NcclPlan() override;

 private:
  struct Weights {
    // By what this rank's values are multiplied; none: they are added up as they are.
    std::optional<double> factor;
    double sum = 1;  // of the ranks that NCCL connects
  };

  void step(Watch& watch) override;
  const char* how() const override { return "by NCCL"; }
  const char* have_not() const override { return "NCCL has not"; }
  void begin_step() override { turn_.emplace(team_.turns()); }
  void go_on() override;
  void throw_if_way_failed() override;
  void abort() override { communicator_->abort(); }
  void abandon() override;

  device::Pointer memory_of(int bucket) const { return buckets_->data() + begins_[static_cast<size_t>(bucket)]; }

  bool has_turn();
  Weights weigh(Watch& watch);
  void fill(int number, std::optional<double> factor);
  void reduce(int number, std::optional<double> factor);
  void gather(int number);

  const std::shared_ptr<std::byte> numbers_;  // of the host: this rank's weight, and the sum of all
  std::unique_ptr<device::Pinned> pinned_numbers_;
  std::vector<size_t> begins_;  // [bucket] in the memory of
  std::unique_ptr<device::Buffer> buckets_, sum_of_weights_;
  std::unique_ptr<device::Event> summed_, end_;
  // The courier's.
  std::unique_ptr<BetweenNodes> between_;  // null: NCCL connects all ranks
  std::unique_ptr<device::Communicator> communicator_;

  // With the lock:
  std::optional<Turns::Turn> turn_;  // of a step that has begun
};

}  // namespace keras_hpc
