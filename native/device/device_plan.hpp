// SPDX-License-Identifier: Apache-2.0
// A plan whose tensors are on a GPU: what all ways of reducing them have in common. staged_plan.hpp goes through memory
// of the host, the others (direct_plan.hpp) from GPU to GPU.
#pragma once
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/condition.hpp"
#include "device/device.hpp"
#include "device/loans.hpp"
#include "engine/attendant.hpp"
#include "engine/plan.hpp"

namespace keras_hpc {

class Team;

// A rank's weight in a mean: a number, or where the device has one.
struct DeviceWeight {
  double number = 1;
  device::Pointer at = 0;
  size_t nbytes = 0;  // there: 4 of a float, or 8 of a double
};

class DevicePlan : public Attendant {
 public:
  // Reduces a tensor where it is on the device, after what the stream has been given so far. It is the engine's until
  // the stream has waited. Returns at once. Thread-safe.
  virtual void start_on(int tensor, device::Pointer data, const DeviceWeight& weight, device::StreamHandle stream) = 0;
  // For who has no streams: starts a copy of what the device has computed. Where its mean will be, once the step is
  // over; the memory lives as long as the pointer.
  device::Loan lend(int tensor, device::Pointer data, double weight);
  // A tensor on the host, whose mean is in the plan's memory after wait_on; null: zeros.
  virtual void start(int tensor, const void* data, double weight) = 0;
  // Once all tensors have been started: blocks until all are reduced. What is given to the stream from then on finds
  // the means. After an error nothing of ours reads or writes the tensors any more. No wait for the device is longer
  // than the team's limit.
  virtual void wait_on(device::StreamHandle stream) = 0;
  // What the second update of a pipelined step applies, as Pipeline::second.
  virtual void second_on(const std::vector<device::Pointer>& data, device::StreamHandle stream) = 0;

  // How many updates the step makes, into memory of the device.
  void write_updates(device::Pointer to, device::StreamHandle stream);
  // Blocks until the default stream has done what it was given: for who has no stream of its own.
  void finish();

  bool is_of(const Plan& plan) const override { return &plan_ == &plan; }
  void stop() override;

 protected:
  static constexpr auto kNap = std::chrono::microseconds(10);  // between two looks at what is on its way

  DevicePlan(Team& team, Plan& plan, int ordinal);

  int count() const { return plan_.layout().tensor_count(); }
  size_t nbytes(int tensor) const { return plan_.layout().range(tensor).size(); }

  // Runs a thread of ours until stop(), with the device's context. What it cannot begin with is thrown here, what it
  // throws later is the team's error.
  void run_courier(std::function<void()> work);
  virtual int updates() const { return 1; }
  virtual std::vector<const device::Stream*> streams() const = 0;  // ours
  // The device has not done all on them, and may write somewhere later: that memory is never given back.
  virtual void abandon() = 0;

  void check_memory(int tensor, device::Pointer data) const;
  // A tensor of the step, of which the first one's weight is the rank's. With the lock. Throws Error where it was
  // started before.
  void count_in(int tensor, const DeviceWeight& weight);
  // For who waits, with the lock: until the step is over, or there is an error, which it throws; the caller may
  // interrupt it. And then, to make room for the next step.
  void await_step(std::unique_lock<std::mutex>& lock);
  void forget_step();
  // For the courier: until a step has begun, or it is to end; and that the step is over.
  void await_start();
  void end_step();
  // Until the device has done what it was given, as long as the team waits for other ranks.
  template <class Ready>
  void await(Ready&& ready, const char* what);
  // With the device's context. An error is the team's.
  template <class Caught = std::exception, class F>
  void guarded(F&& f);
  void fail(std::exception_ptr error);
  // Until the device has done what it was given: the caller's memory is the caller's again. False: it may never.
  bool drain() noexcept;
  // With the lock, but while it waits for the device.
  void throw_if_failed();
  Timeout late(const std::string& what) const;
  double time_limit() const;

  Team& team_;
  Plan& plan_;
  const device::Device device_;

  std::mutex mutex_;
  Condition changed_;
  std::exception_ptr error_;
  // Of the step, with the lock:
  std::vector<bool> is_started_;  // [tensor] by the caller
  int started_ = 0;
  DeviceWeight weight_;
  bool is_over_ = false;
  std::atomic<bool> is_hung_{false};  // the device, when it was last waited for
  std::atomic<bool> stopping_{false};

 private:
  device::Event end_;  // of finish
  // Of lend, with its lock; null: nobody has asked.
  std::mutex lending_mutex_;
  std::unique_ptr<device::Loans> loans_;
  std::unique_ptr<device::Stream> lending_stream_;
  std::atomic<const device::Stream*> stream_of_loans_{nullptr};  // the same, for any thread
  std::thread courier_;
};

template <class Ready>
void DevicePlan::await(Ready&& ready, const char* what) {
  for (const auto begin = Clock::now(); !ready(); std::this_thread::sleep_for(kNap)) {
    {
      const std::lock_guard lock(mutex_);
      if (error_) std::rethrow_exception(error_);
    }
    if (seconds_since(begin) > time_limit()) throw late(what);
  }
}

template <class Caught, class F>
void DevicePlan::guarded(F&& f) {
  try {
    const device::Current current(device_);
    f();
  } catch (const Caught&) {
    fail(std::current_exception());
    drain();
    throw;
  }
}

}  // namespace keras_hpc
