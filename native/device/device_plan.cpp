// SPDX-License-Identifier: Apache-2.0
#include "device/device_plan.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <future>
#include <optional>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {
namespace {

using device::Current;

constexpr auto kSlice = std::chrono::milliseconds(900);
constexpr double kDrainSeconds = 10;

std::exception_ptr error_of_team(const Team& team, std::exception_ptr otherwise) {
  try {
    team.throw_if_failed();
  } catch (const std::exception&) {
    return std::current_exception();
  }
  return otherwise;
}

}  // namespace

DevicePlan::DevicePlan(Team& team, Plan& plan, int ordinal)
    : team_(team), plan_(plan), device_(ordinal), is_started_(at(count())), end_(device_) {}

double DevicePlan::time_limit() const {
  return team_.time_limit();
}

Timeout DevicePlan::late(const std::string& what) const {
  return Timeout("The GPU of rank " + std::to_string(team_.topology().rank) + " has not " + what + " (" + plan_.what() +
                 ") after " + std::to_string(static_cast<int>(time_limit())) +
                 " s, the time limit. Is it hung, or does something else use it?");
}

// ---- the caller's threads

void DevicePlan::check_memory(int tensor, device::Pointer data) const {
  if (nbytes(tensor) > 0) device_.check_owns(data, "Tensor '" + plan_.tensors()[at(tensor)].name + "'");
}

void DevicePlan::count_in(int tensor, const DeviceWeight& weight) {
  if (is_started_[at(tensor)]) throw Error(plan_.describe(tensor) + " was started twice without a wait in between.");
  is_started_[at(tensor)] = true;
  if (++started_ == 1) weight_ = weight;
}

void DevicePlan::await_step(std::unique_lock<std::mutex>& lock) {
  throw_if_failed();
  for (int t = 0; t < count(); ++t)
    if (!is_started_[at(t)]) throw Error(plan_.describe(t) + " was waited for but not started.");
  while (!changed_.wait_for(lock, kSlice, [this] { return is_over_ || error_; })) {
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
}

void DevicePlan::forget_step() {
  is_started_.assign(is_started_.size(), false);
  started_ = 0;
  is_over_ = false;
}

device::Loan DevicePlan::lend(int tensor, device::Pointer data, double weight) {
  device::Loan loan{};
  guarded<device::DriverError>([&] {
    check_memory(tensor, data);
    const std::lock_guard lock(lending_mutex_);
    if (!loans_) {
      std::vector<size_t> sizes;
      for (int t = 0; t < count(); ++t) sizes.push_back(nbytes(t));
      loans_ = std::make_unique<device::Loans>(device_.ordinal(), sizes);
      lending_stream_ = std::make_unique<device::Stream>(device_);
      stream_of_loans_ = lending_stream_.get();
    }
    loan = loans_->lend(tensor);
    const device::StreamHandle stream = lending_stream_->handle();
    if (nbytes(tensor) > 0)
      device_.check(device_.api().copy_within(loan.data, data, nbytes(tensor), stream), "cuMemcpyDtoDAsync");
    start_on(tensor, loan.data, {weight}, stream);
  });
  return loan;
}

void DevicePlan::write_updates(device::Pointer to, device::StreamHandle stream) {
  const int made = updates();
  guarded(
      [&] { device_.check(device_.api().set_words(to, static_cast<unsigned>(made), 1, stream), "cuMemsetD32Async"); });
}

void DevicePlan::finish() {
  guarded([&] {
    end_.record(nullptr);
    await([this] { return end_.is_over(); }, "come to the end of the step");
  });
}

// ---- the courier

void DevicePlan::run_courier(std::function<void()> work) {
  std::promise<void> begun;
  courier_ = std::thread([this, &begun, work = std::move(work)] {
    prctl(PR_SET_NAME, "khpc-device");
    prctl(PR_SET_TIMERSLACK, 1);  // naps of microseconds, not of 50
    std::optional<Current> current;
    try {
      current.emplace(device_);
    } catch (const std::exception&) {
      return begun.set_exception(std::current_exception());
    }
    begun.set_value();
    try {
      work();
    } catch (const std::exception&) {
      fail(std::current_exception());
    }
  });
  try {
    begun.get_future().get();
  } catch (const std::exception&) {
    courier_.join();
    throw;
  }
}

void DevicePlan::await_start() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopping_ || (!error_ && !is_over_ && started_ > 0); });
}

void DevicePlan::end_step() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
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
  if (drain()) return;
  abandon();
  static_cast<void>(loans_.release());
}

// ---- errors

void DevicePlan::throw_if_failed() {
  if (!error_) return;
  const std::exception_ptr error = error_;
  mutex_.unlock();  // the courier wants it, to see the error too, and to end what the device is at
  drain();
  mutex_.lock();
  std::rethrow_exception(error);
}

void DevicePlan::fail(std::exception_ptr error) {
  team_.fail(error);  // first: once its caller sees the error, it may leave, and the others would hear only of that
  try {
    std::rethrow_exception(error);
  } catch (const NetworkError&) {  // others may know better
    error = error_of_team(team_, error);
  } catch (const std::exception&) {  // it says what it is
  }
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
  }
  changed_.notify_all();
}

// It waits for nothing but the caller's own streams, which a broken device may never finish: that is not waited for
// again.
bool DevicePlan::drain() noexcept {
  const auto begin = Clock::now();
  try {
    const Current current(device_);
    auto of_ours = streams();
    if (const device::Stream* stream = stream_of_loans_) of_ours.push_back(stream);
    const auto is_busy = [](const device::Stream* stream) { return !stream->is_idle(); };
    while (std::any_of(of_ours.begin(), of_ours.end(), is_busy)) {
      if (is_hung_ || seconds_since(begin) > kDrainSeconds) {
        is_hung_ = true;
        return false;
      }
      std::this_thread::sleep_for(kNap);
    }
  } catch (const std::exception&) {  // then it does nothing any more
  }
  return true;
}

}  // namespace keras_hpc
