// SPDX-License-Identifier: Apache-2.0
// The way of a device plan that always works: staged through pinned memory of the host.
//
// A step, for each tensor:   start_on   what the caller's stream has computed is copied to the host, on a stream of
// ours
//                            courier    once the copy is there, starts the tensor in the plan on the host; once that is
//                                       reduced, copies the mean back, on another stream of ours
// and in its end:            wait_on    blocks until all copies back are queued; the caller's stream waits for them
//
// So the host waits only in wait_on, and the GPU for nothing but its data. The order is made by events alone:
//   ready[t]    on the caller's stream at start_on; the stream `out` waits for it before it copies
//   arrived[t]  on `out` after that copy; the courier asks for it
//   back        on `in` after the last copy back; the caller's stream waits for it, and `out` does at the next start
//   free        on the caller's stream at second_on; `in` waits for it before it copies to memory that is new to us
// The plan's tensors live in its segment, whose part of this rank is pinned: owners reduce there what the GPU has put
// there. Pipelined steps exchange the segment's average with pinned memory of their own.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "device/device_plan.hpp"
#include "engine/pipeline.hpp"

namespace keras_hpc {

class StagedPlan final : public DevicePlan {
 public:
  // `plan` has its tensors in its segment; `pipeline`: null where steps are synchronous. Throws Error where the device
  // cannot be opened or the memory not be pinned: by this rank alone, so ranks agree on what they do then.
  StagedPlan(Team& team, Plan& plan, Pipeline* pipeline, int ordinal);
  ~StagedPlan() override;

  void start_on(int tensor, device::Pointer data, const DeviceWeight& weight, device::StreamHandle stream) override;
  void start(int tensor, const void* data, double weight) override;
  void wait_on(device::StreamHandle stream) override;
  void second_on(const std::vector<device::Pointer>& data, device::StreamHandle stream) override;

 private:
  struct Tensor {
    explicit Tensor(const device::Device& device) : ready(device), arrived(device) {}
    device::Event ready, arrived;
    device::Pointer data = 0;  // 0: on the host
    bool in_plan = false;      // started in the plan on the host
  };

  int updates() const override { return pipeline_ == nullptr ? 1 : pipeline_->updates(); }
  std::vector<const device::Stream*> streams() const override { return {out_.get(), in_.get()}; }
  void abandon() override;
  std::byte* place(int tensor) const { return places_ + plan_.layout().range(tensor).begin; }
  Tensor& of(int tensor) { return *tensors_[static_cast<size_t>(tensor)]; }

  void begin(int tensor, const DeviceWeight& weight);
  void serve();
  bool take_arrivals();
  bool give_back();
  void start_in_plan(int tensor);
  double weight_now() const;
  void await_copies_back();
  void look_at_device(bool moved);

  Pipeline* const pipeline_;
  const std::shared_ptr<std::byte> memory_;  // the plan's; it may outlive it
  std::shared_ptr<std::byte> own_;           // of pipelined steps
  std::byte* places_;                        // where each tensor goes to and comes from
  size_t nbytes_;
  std::shared_ptr<std::byte> weight_place_;
  std::unique_ptr<device::Pinned> pinned_, pinned_weight_;
  std::unique_ptr<device::Stream> out_, in_;
  std::unique_ptr<device::Event> back_, free_;
  std::vector<std::unique_ptr<Tensor>> tensors_;

  std::atomic<bool> awaits_copies_back_{false};  // the caller

  // With the lock:
  std::deque<int> on_their_way_;  // to the host, in the order of `out`
  int in_plan_ = 0;
  int back_count_ = 0;          // the tensors before it are on their way back
  Clock::time_point moved_at_;  // when something last happened in this step
};

}  // namespace keras_hpc
