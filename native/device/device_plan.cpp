// SPDX-License-Identifier: Apache-2.0
#include "device/device_plan.hpp"

#include <sys/prctl.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {
namespace {

using device::Current;

constexpr auto kNap = std::chrono::microseconds(10);  // between two looks at what is on its way
constexpr auto kSlice = std::chrono::milliseconds(900);
constexpr double kDrainSeconds = 10;

Timeout late(const Team& team, const std::string& plan, const char* what) {
  return Timeout("The GPU of rank " + std::to_string(team.topology().rank) + " has not " + what + " (" + plan +
                 ") after " + std::to_string(static_cast<int>(team.time_limit())) +
                 " s, the time limit. Is it hung, or does something else use it?");
}

}  // namespace

DevicePlan::DevicePlan(Team& team, Plan& plan, Pipeline* pipeline, int ordinal)
    : team_(team),
      plan_(plan),
      pipeline_(pipeline),
      device_(ordinal),
      memory_(plan.memory()),
      own_(pipeline == nullptr ? nullptr : device::pages(plan.layout().nbytes())),
      places_(pipeline == nullptr ? memory_.get() : own_.get()),
      nbytes_(plan.layout().nbytes()),
      weight_place_(device::pages(sizeof(double))),
      out_(std::make_unique<device::Stream>(device_)),
      in_(std::make_unique<device::Stream>(device_)),
      back_(std::make_unique<device::Event>(device_)) {
  pinned_weight_ = std::make_unique<device::Pinned>(device_, weight_place_.get(), sizeof(double));
  if (nbytes_ > 0) pinned_ = std::make_unique<device::Pinned>(device_, places_, nbytes_);
  for (int t = 0; t < count(); ++t) tensors_.push_back(std::make_unique<Tensor>(device_));
  courier_ = std::thread([this] { serve(); });
}

DevicePlan::~DevicePlan() {
  stop();
}

void DevicePlan::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (!error_) error_ = std::make_exception_ptr(Error(plan_.what() + " has ended, or its team was closed."));
  }
  changed_.notify_all();
  if (!courier_.joinable()) return;
  courier_.join();
  drain();
}

// ---- the caller's threads

void DevicePlan::throw_if_failed() {
  if (!error_) return;
  drain();
  std::rethrow_exception(error_);
}

void DevicePlan::begin(int tensor) {
  throw_if_failed();
  if (of(tensor).started) throw Error(plan_.describe(tensor) + " was started twice without a wait in between.");
  if (started_ == 0) back_->make_wait(out_->handle());  // places are free when the last step's means have left them
  of(tensor).started = true;
  ++started_;
  moved_at_ = Clock::now();
}

// An error is the team's.
template <class Caught, class F>
void DevicePlan::guarded(F&& f) {
  try {
    f();
  } catch (const Caught&) {
    fail(std::current_exception());
    drain();
    throw;
  }
}

void DevicePlan::start_on(int tensor, device::Pointer data, const DeviceWeight& weight, device::StreamHandle stream) {
  const Current current(device_);
  if (nbytes(tensor) > 0) device_.check_owns(data, "Tensor '" + plan_.tensors()[at(tensor)].name + "'");
  const device::Api& api = device_.api();
  guarded<device::DriverError>([&] {
    const std::lock_guard lock(mutex_);
    begin(tensor);
    Tensor& t = of(tensor);
    t.data = nbytes(tensor) > 0 ? data : 0;
    t.ready.record(stream);
    t.ready.make_wait(out_->handle());
    if (started_ == 1) {
      weight_ = weight;
      if (weight.at != 0)
        device_.check(api.copy_to_host(weight_place_.get(), weight.at, weight.nbytes, out_->handle()),
                      "cuMemcpyDtoHAsync");
    }
    if (t.data != 0)
      device_.check(api.copy_to_host(place(tensor), data, nbytes(tensor), out_->handle()), "cuMemcpyDtoHAsync");
    t.arrived.record(out_->handle());
    on_their_way_.push_back(tensor);
  });
  changed_.notify_all();
}

void DevicePlan::start(int tensor, const void* data, double weight) {
  const Current current(device_);
  guarded<device::DriverError>([&] {
    const std::lock_guard lock(mutex_);
    begin(tensor);
    if (started_ == 1) weight_ = {weight};
    of(tensor).data = 0;
  });
  guarded([&] {
    await_copies_back();
    if (nbytes(tensor) > 0 && data == nullptr)
      std::memset(place(tensor), 0, nbytes(tensor));
    else if (nbytes(tensor) > 0 && data != place(tensor))
      std::memcpy(place(tensor), data, nbytes(tensor));
    start_in_plan(tensor);
  });
  changed_.notify_all();
}

// Until the device has done what it was given, as long as the team waits for other ranks.
template <class Ready>
void DevicePlan::await(Ready&& ready, const char* what) {
  for (const auto begin = Clock::now(); !ready(); std::this_thread::sleep_for(kNap)) {
    {
      const std::lock_guard lock(mutex_);
      if (error_) std::rethrow_exception(error_);
    }
    if (seconds_since(begin) > team_.time_limit()) throw late(team_, plan_.what(), what);
  }
}

// The host is about to write where the last step's means may still be copied from. Normally they have long left.
void DevicePlan::await_copies_back() {
  await([this] { return back_->is_over(); }, "copied the last step's means");
}

void DevicePlan::wait_on(device::StreamHandle stream) {
  const Current current(device_);
  std::unique_lock lock(mutex_);
  throw_if_failed();
  for (int t = 0; t < count(); ++t)
    if (!of(t).started) throw Error(plan_.describe(t) + " was waited for but not started.");
  while (!changed_.wait_for(lock, kSlice, [this] { return over_ || error_; })) {
    if (check_interrupt == nullptr) continue;
    lock.unlock();
    try {
      check_interrupt();
    } catch (const std::exception&) {
      fail(std::current_exception());
    }
    lock.lock();
  }
  throw_if_failed();
  lock.unlock();
  guarded([&] { back_->make_wait(stream); });
  lock.lock();
  for (const auto& tensor : tensors_) tensor->started = tensor->in_plan = false;
  started_ = in_plan_ = back_count_ = 0;
  over_ = false;
}

void DevicePlan::second_on(const std::vector<device::Pointer>& data, device::StreamHandle stream) {
  if (pipeline_ == nullptr) throw Error("Plan '" + plan_.name() + "' is not pipelined.");
  const Current current(device_);
  {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
  }
  guarded([&] {
    await_copies_back();
    for (int t = 0; t < count(); ++t) {
      pipeline_->second(t, place(t));
      const device::Pointer to = data[at(t)];
      if (nbytes(t) > 0 && to != 0)
        device_.check(device_.api().copy_to_device(to, place(t), nbytes(t), in_->handle()), "cuMemcpyHtoDAsync");
    }
    back_->record(in_->handle());
    back_->make_wait(stream);
  });
}

void DevicePlan::write_updates(device::Pointer to, device::StreamHandle stream) {
  const Current current(device_);
  const int updates = pipeline_ == nullptr ? 1 : pipeline_->updates();
  guarded([&] {
    device_.check(device_.api().set_words(to, static_cast<unsigned>(updates), 1, stream), "cuMemsetD32Async");
  });
}

void DevicePlan::finish() {
  const Current current(device_);
  guarded([&] {
    back_->record(nullptr);
    await([this] { return back_->is_over(); }, "come to the end of the step");
  });
}

// ---- the courier

void DevicePlan::serve() {
  prctl(PR_SET_NAME, "khpc-device");
  prctl(PR_SET_TIMERSLACK, 1);  // naps of microseconds, not of 50
  try {
    const Current current(device_);
    while (!stopping_) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stopping_ || (!error_ && !over_ && started_ > 0); });
        if (stopping_) return;
      }
      team_.throw_if_failed();
      const bool arrived = take_arrivals();
      const bool given_back = give_back();
      look_at_device(arrived || given_back);
      if (!arrived && !given_back) std::this_thread::sleep_for(kNap);
    }
  } catch (const std::exception&) {
    fail(std::current_exception());
  }
}

// Once the caller has started all tensors, all that is missing is what the device has not computed or copied yet.
void DevicePlan::look_at_device(bool moved) {
  const std::lock_guard lock(mutex_);
  if (moved || started_ < count() || on_their_way_.empty()) moved_at_ = Clock::now();
  if (seconds_since(moved_at_) > team_.time_limit())
    throw late(team_, plan_.what(), ("computed '" + plan_.tensors()[at(on_their_way_.front())].name + "'").c_str());
}

// What has come from the device, in the order in which it was sent, starts in the plan.
bool DevicePlan::take_arrivals() {
  for (bool any = false;; any = true) {
    int tensor = -1;
    {
      const std::lock_guard lock(mutex_);
      if (!on_their_way_.empty()) tensor = on_their_way_.front();
    }
    if (tensor < 0 || !of(tensor).arrived.is_over()) return any;
    start_in_plan(tensor);
    const std::lock_guard lock(mutex_);
    on_their_way_.pop_front();
  }
}

void DevicePlan::start_in_plan(int tensor) {
  const double weight = weight_now();
  if (pipeline_ != nullptr)
    pipeline_->start(tensor, place(tensor), weight);
  else
    team_.start(plan_, tensor, place(tensor), weight);
  const std::lock_guard lock(mutex_);
  of(tensor).in_plan = true;
  ++in_plan_;
}

double DevicePlan::weight_now() const {
  if (weight_.at == 0) return weight_.number;
  float number;
  double exact;
  std::memcpy(&number, weight_place_.get(), sizeof number);
  std::memcpy(&exact, weight_place_.get(), sizeof exact);
  return weight_.nbytes == sizeof number ? number : exact;
}

// What is reduced goes back, in the plan's order; once all tensors are in the plan, this thread waits for them.
bool DevicePlan::give_back() {
  for (bool any = false;; any = true) {
    {
      const std::lock_guard lock(mutex_);
      const bool all = in_plan_ == count();
      const auto is_complete = [&] { return of(back_count_).in_plan && plan_.is_complete(back_count_); };
      if (!all && (pipeline_ != nullptr || !is_complete())) return any;
    }
    if (pipeline_ != nullptr)
      pipeline_->wait(back_count_);
    else
      team_.wait(plan_, back_count_);
    {
      const std::lock_guard lock(mutex_);
      if (error_) return any;  // and the memory may be the caller's again
      const Tensor& t = of(back_count_);
      // The first pipelined step has no mean yet, and makes no update.
      if (t.data != 0 && (pipeline_ == nullptr || pipeline_->updates() > 0))
        device_.check(device_.api().copy_to_device(t.data, place(back_count_), nbytes(back_count_), in_->handle()),
                      "cuMemcpyHtoDAsync");
    }
    if (++back_count_ < count()) continue;
    back_->record(in_->handle());
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    return true;
  }
}

// ---- errors

void DevicePlan::fail(std::exception_ptr error) {
  team_.fail(error);  // first: once its caller sees the error, it may leave, and the others would hear only of that
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
  }
  changed_.notify_all();
}

// Until the device has done what it was given: the caller's memory is the caller's again. It waits for nothing but the
// caller's own streams, which a broken device may never finish.
void DevicePlan::drain() noexcept {
  const auto begin = Clock::now();
  try {
    const Current current(device_);
    while (!(out_->is_idle() && in_->is_idle()) && seconds_since(begin) < kDrainSeconds)
      std::this_thread::sleep_for(kNap);
  } catch (const std::exception&) {  // then it does nothing any more
  }
}

}  // namespace keras_hpc
