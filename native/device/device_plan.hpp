// SPDX-License-Identifier: Apache-2.0
// A plan whose tensors are on a GPU, staged through pinned memory of the host.
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
// The plan's tensors live in its segment, whose part of this rank is pinned: owners reduce there what the GPU has put
// there. Pipelined steps exchange the segment's average with pinned memory of their own.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/device.hpp"
#include "engine/attendant.hpp"
#include "engine/pipeline.hpp"
#include "engine/plan.hpp"

namespace keras_hpc {

class Team;

// A rank's weight in a mean: a number, or where the device has one.
struct DeviceWeight {
  double number = 1;
  device::Pointer at = 0;
  size_t nbytes = 0;  // there: 4 of a float, or 8 of a double
};

class DevicePlan final : public Attendant {
 public:
  // `plan` has its tensors in its segment; `pipeline`: null where steps are synchronous. Throws Error where the device
  // cannot be opened or the memory not be pinned: by this rank alone, so ranks agree on what they do then.
  DevicePlan(Team& team, Plan& plan, Pipeline* pipeline, int ordinal);
  ~DevicePlan() override;

  // Reduces a tensor where it is on the device, after what the stream has been given so far. It is the engine's until
  // the stream has waited. Returns at once. Thread-safe.
  void start_on(int tensor, device::Pointer data, const DeviceWeight& weight, device::StreamHandle stream);
  // A tensor on the host, whose mean is in the plan's memory after wait_on; null: zeros.
  void start(int tensor, const void* data, double weight);
  // Once all tensors have been started: blocks until all are reduced. What is given to the stream from then on finds
  // the means. After an error nothing of ours reads or writes the tensors any more. No wait for the device is longer
  // than the team's limit.
  void wait_on(device::StreamHandle stream);
  // What the second update of a pipelined step applies, as Pipeline::second.
  void second_on(const std::vector<device::Pointer>& data, device::StreamHandle stream);

  // How many updates the step makes, into memory of the device.
  void write_updates(device::Pointer to, device::StreamHandle stream);
  // Blocks until the default stream has done what it was given: for who has no stream of its own.
  void finish();

  bool is_of(const Plan& plan) const override { return &plan_ == &plan; }
  void stop() override;

 private:
  struct Tensor {
    explicit Tensor(const device::Device& device) : ready(device), arrived(device) {}
    device::Event ready, arrived;
    device::Pointer data = 0;  // 0: on the host
    bool started = false;      // by the caller
    bool in_plan = false;      // and in the plan on the host
  };

  int count() const { return plan_.layout().tensor_count(); }
  size_t nbytes(int tensor) const { return plan_.layout().range(tensor).size(); }
  std::byte* place(int tensor) const { return places_ + plan_.layout().range(tensor).begin; }
  Tensor& of(int tensor) { return *tensors_[static_cast<size_t>(tensor)]; }

  void begin(int tensor);
  void serve();
  bool take_arrivals();
  bool give_back();
  void start_in_plan(int tensor);
  double weight_now() const;
  template <class Ready>
  void await(Ready&& ready, const char* what);
  void await_copies_back();
  void look_at_device(bool moved);
  template <class Caught = std::exception, class F>
  void guarded(F&& f);
  void fail(std::exception_ptr error);
  void drain() noexcept;
  void throw_if_failed();

  Team& team_;
  Plan& plan_;
  Pipeline* const pipeline_;
  const device::Device device_;
  const std::shared_ptr<std::byte> memory_;  // the plan's; it may outlive it
  std::shared_ptr<std::byte> own_;           // of pipelined steps
  std::byte* places_;                        // where each tensor goes to and comes from
  size_t nbytes_;
  std::shared_ptr<std::byte> weight_place_;
  std::unique_ptr<device::Pinned> pinned_, pinned_weight_;
  std::unique_ptr<device::Stream> out_, in_;
  std::unique_ptr<device::Event> back_;
  std::vector<std::unique_ptr<Tensor>> tensors_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<int> on_their_way_;  // to the host, in the order of `out`
  int started_ = 0, in_plan_ = 0;
  int back_count_ = 0;  // the tensors before it are on their way back
  DeviceWeight weight_;
  Clock::time_point moved_at_;  // when something last happened in this step
  bool over_ = false;           // all are on their way back
  std::exception_ptr error_;
  std::atomic<bool> stopping_{false};
  std::thread courier_;
};

}  // namespace keras_hpc
