// SPDX-License-Identifier: Apache-2.0
// The ways of a device plan by NCCL, from GPU to GPU. Either NCCL connects all ranks, and nothing goes through the
// host: between nodes NCCL has a network of its own. Or it connects those of a node, and parts of what these have added
// up go between nodes on the engine's network (between_nodes.hpp).
//
// A step, for each tensor:  start_on   an event is recorded on the caller's stream
// by the courier,           weigh      where ranks count with their weights, these are added up, once per step
// for each bucket in turn:  fill       once its tensors have been started, a stream of ours waits for them, and copies
//                                      them into the bucket;
//                           reduce     which it sums up over the ranks, or scatters the sums of the node
//                           give_back  and copies the sums back: at once, or, once its sums have come from the other
//                                      nodes and all buckets have left, after it has gathered them
// and in its end:           wait_on    blocks until the device has done all of it
//
// Buckets are taken in the same order on all ranks, as NCCL needs it, whatever backward has computed first. So are the
// steps of a team's plans, one at a time: kernels of two communicators that a GPU has no room for at once would wait
// for each other for ever, if ranks began with different ones. Frameworks begin steps in one order on all ranks. The
// host waits for the device's end, so that no rank goes on with a step that NCCL cannot end; an error ends what is
// under way by ncclCommAbort. The order is made by events alone:
//   ready[t]  on the caller's stream at start_on; ours waits for it before it copies
//   came      on our stream once a weight has come to the host; the courier asks for it
//   end       on our stream after the last copy back; the courier asks for it
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "common/turns.hpp"
#include "device/between_nodes.hpp"
#include "device/device_plan.hpp"
#include "device/nccl.hpp"

namespace keras_hpc {

class NcclPlan final : public DevicePlan {
 public:
  // For NCCL within nodes: what reduces between them; see BetweenNodes. Null: NCCL connects all ranks.
  struct Peers {
    std::shared_ptr<Team> team;
    std::shared_ptr<Plan> parts;
  };
  // Collective on the ranks that NCCL connects, each of which has a GPU of its own. A sum or mean of floats, in the
  // segment, not pipelined. Throws Error where the device, its memory or NCCL cannot be had.
  NcclPlan(Team& team, Plan& plan, int ordinal, const device::NcclId& id, const Peers& peers);
  ~NcclPlan() override;

  void start_on(int tensor, device::Pointer data, const DeviceWeight& weight, device::StreamHandle stream) override;
  void start(int tensor, const void* data, double weight) override;
  void wait_on(device::StreamHandle stream) override;
  void second_on(const std::vector<device::Pointer>& data, device::StreamHandle stream) override;

 private:
  struct Tensor {
    explicit Tensor(const device::Device& device) : ready(device) {}
    device::Event ready;
    device::Pointer data = 0;  // 0: on the host
  };
  struct Watch;  // over a step
  struct Weights {
    // By what this rank's values are multiplied; none: they are added up as they are.
    std::optional<double> factor;
    double sum = 1;  // of the ranks that NCCL connects
  };

  std::vector<const device::Stream*> streams() const override { return {stream_.get()}; }
  void abandon() override;

  std::byte* place(int tensor) const { return memory_.get() + plan_.layout().range(tensor).begin; }
  const Bucket& bucket(int number) const { return plan_.layout().buckets()[static_cast<size_t>(number)]; }
  int bucket_count() const { return static_cast<int>(plan_.layout().buckets().size()); }
  device::Pointer memory_of(int bucket) const { return buckets_->data() + begins_[static_cast<size_t>(bucket)]; }
  Tensor& of(int tensor) { return *tensors_[static_cast<size_t>(tensor)]; }

  void begin(int tensor, const DeviceWeight& weight);
  void serve();
  void step();
  bool has_turn();
  bool has_begun(const Bucket& bucket);
  Weights weigh(Watch& watch);
  void fill(int number, std::optional<double> factor);
  void reduce(int number, std::optional<double> factor);
  void gather(int number);
  void give_back(int number);
  template <class F>
  void for_parts(int number, F&& f);

  const std::shared_ptr<std::byte> memory_;   // the plan's; it may outlive it
  const std::shared_ptr<std::byte> numbers_;  // of the host: see the .cpp
  std::unique_ptr<device::Pinned> pinned_, pinned_numbers_;
  std::vector<size_t> begins_;  // [bucket] in the memory of
  std::unique_ptr<device::Buffer> buckets_, sum_of_weights_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<device::Event> came_, end_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  // The courier's.
  std::unique_ptr<BetweenNodes> between_;  // null: NCCL connects all ranks
  std::unique_ptr<device::Communicator> communicator_;

  // With the lock:
  std::optional<Turns::Turn> turn_;  // of a step that has begun
};

}  // namespace keras_hpc
