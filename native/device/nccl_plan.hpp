// SPDX-License-Identifier: Apache-2.0
// The way of a device plan from GPU to GPU, by NCCL: nothing goes through the host. Between nodes, NCCL has a network
// of its own.
//
// A step, for each tensor:  start_on   an event is recorded on the caller's stream
// by the courier,           factor     where ranks count with their weights, these are added up, once per step
// for each bucket in turn:  enqueue    once its tensors have been started, all of this comes to a stream of ours: to
// wait
//                                      for them, to copy them into the bucket, to sum that up over the ranks, and to
//                                      copy the sums back
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
#include "device/device_plan.hpp"
#include "device/nccl.hpp"

namespace keras_hpc {

class NcclPlan final : public DevicePlan {
 public:
  // Collective on the team, each of whose ranks has a GPU of its own. A sum or mean of floats, in the segment, not
  // pipelined. Throws Error where the device, its memory or NCCL cannot be had.
  NcclPlan(Team& team, Plan& plan, int ordinal, const device::NcclId& id);
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
    bool started = false;
  };
  struct Watch;  // over a step

  std::vector<const device::Stream*> streams() const override { return {stream_.get()}; }
  void abandon() override;

  std::byte* place(int tensor) const { return memory_.get() + plan_.layout().range(tensor).begin; }
  device::Pointer in_bucket(size_t offset) const { return buckets_->data() + offset; }
  Tensor& of(int tensor) { return *tensors_[static_cast<size_t>(tensor)]; }

  void begin(int tensor, const DeviceWeight& weight);
  void serve();
  void step();
  bool has_turn();
  bool has_begun(const Bucket& bucket);
  std::optional<double> factor(Watch& watch);
  void enqueue(const Bucket& bucket, std::optional<double> factor);

  const std::shared_ptr<std::byte> memory_;   // the plan's; it may outlive it
  const std::shared_ptr<std::byte> numbers_;  // of the host: see the .cpp
  std::unique_ptr<device::Pinned> pinned_, pinned_numbers_;
  std::unique_ptr<device::Buffer> buckets_, sum_of_weights_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<device::Event> came_, end_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::unique_ptr<device::Communicator> communicator_;  // the courier's

  // With the lock:
  int started_ = 0;
  DeviceWeight weight_;
  std::optional<Turns::Turn> turn_;  // of a step that has begun
  bool over_ = false;
};

}  // namespace keras_hpc
