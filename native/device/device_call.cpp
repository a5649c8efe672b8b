// SPDX-License-Identifier: Apache-2.0
#include "device/device_call.hpp"

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "device/device.hpp"

namespace keras_hpc {
namespace {

constexpr auto kNap = std::chrono::microseconds(10);  // between two looks at the device

// What the calls of a team on one GPU have in common: memory of the host, which grows to the largest.
class Staging final : public Attendant {
 public:
  Staging(const Team& team, int ordinal) : team_(team), device_(ordinal), event_(device_) {}

  bool is_of(const Plan&) const override { return false; }  // of the team
  void stop() override {
    const std::lock_guard lock(mutex_);
    try {
      await();                              // the device may still read or write there
    } catch (const device::DriverError&) {  // then it does nothing any more
    } catch (const Error&) {
      abandon();
    }
  }

  template <class Reduce>
  void through_host(device::Pointer data, size_t nbytes, device::StreamHandle stream, Reduce&& reduce) {
    const std::lock_guard lock(mutex_);
    const device::Current current(device_);
    device_.check_owns(data, "What is to be reduced");
    await();
    reserve(nbytes);
    device_.check(device_.api().copy_to_host(host_.get(), data, nbytes, stream), "cuMemcpyDtoHAsync");
    mark(stream);
    await();
    reduce(host_.get());
    device_.check(device_.api().copy_to_device(data, host_.get(), nbytes, stream), "cuMemcpyHtoDAsync");
    mark(stream);
    if (stream == nullptr) await();  // who has no stream of its own looks at once
  }

 private:
  // The copy is the stream's last. Where that cannot be marked, it is over when the stream has come to its end.
  void mark(device::StreamHandle stream) {
    try {
      event_.record(stream);
    } catch (const device::DriverError&) {
      device::Result result = device::kNotReady;
      for (const auto begin = Clock::now(); result == device::kNotReady && seconds_since(begin) < team_.time_limit();
           std::this_thread::sleep_for(kNap))
        result = device_.api().query_stream(stream);
      if (result != 0) abandon();
      throw;
    }
  }

  // The memory is never given back: the device may write there, if it ever goes on.
  void abandon() {
    if (host_ != nullptr) new std::shared_ptr<std::byte>(host_);
    pinned_.release();
    host_ = nullptr;
    nbytes_ = 0;
  }

  void await() const {
    for (const auto begin = Clock::now(); !event_.is_over(); std::this_thread::sleep_for(kNap))
      if (seconds_since(begin) > team_.time_limit())
        throw Timeout("The GPU of rank " + std::to_string(team_.topology().rank) +
                      " has not copied what is to be reduced, or its result, within the time limit.");
  }

  void reserve(size_t nbytes) {
    if (nbytes <= nbytes_) return;
    pinned_.reset();
    nbytes_ = 0;
    host_ = device::pages(nbytes);
    nbytes_ = nbytes;
    try {
      pinned_ = std::make_unique<device::Pinned>(device_, host_.get(), nbytes);
    } catch (const device::NotPinned&) {  // then its copies are slower, and wait
    }
  }

  const Team& team_;
  const device::Device device_;
  device::Event event_;  // of the last copy
  std::mutex mutex_;
  std::shared_ptr<std::byte> host_;
  std::unique_ptr<device::Pinned> pinned_;
  size_t nbytes_ = 0;
};

std::shared_ptr<Staging> staging_of(Team& team, int ordinal) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::pair<const Team*, int>, std::weak_ptr<Staging>>;
  const std::lock_guard lock(mutex);
  auto& known = all[{&team, ordinal}];
  auto found = known.lock();
  if (found == nullptr) {
    known = found = std::make_shared<Staging>(team, ordinal);
    team.attach(found);
  }
  return found;
}

}  // namespace

void allreduce_on(const std::shared_ptr<Team>& team, int ordinal, device::Pointer data, DType dtype, Op op,
                  const std::string& what, const std::vector<int64_t>& shape, device::StreamHandle stream) {
  const int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  const auto reduce = [&](void* host) {
    team->allreduce(host, count, dtype, op, std::nullopt, std::nullopt, what, shape);
  };
  if (team->topology().size == 1) return;
  if (count == 0) return reduce(nullptr);
  try {
    staging_of(*team, ordinal)->through_host(data, static_cast<size_t>(count) * size_of(dtype), stream, reduce);
  } catch (const device::DriverError&) {
    team->fail(std::current_exception());
    throw;
  } catch (const Timeout&) {
    team->fail(std::current_exception());
    throw;
  }
}

}  // namespace keras_hpc
