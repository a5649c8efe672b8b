// SPDX-License-Identifier: Apache-2.0
#include "device/device.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "common/pages.hpp"
#include "common/waiting.hpp"

namespace keras_hpc::device {
namespace {

std::atomic<size_t> all_pinned{0};

const Api& driver_or_throw() {
  const Api* found = driver();
  if (found == nullptr) throw Error("This machine has no CUDA driver (libcuda.so.1).");
  return *found;
}

template <class Raised = DriverError>
[[noreturn]] void raise(const Api& api, Result result, const char* function) {
  const char* name = nullptr;
  api.error_name(result, &name);
  throw Raised(std::string("The GPU's driver: ") + function + " failed with " +
               (name == nullptr ? "error " + std::to_string(result) : name) + ".");
}

// As nvidia-smi writes it.
std::string text_of(const Uuid& uuid) {
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    char digits[4];
    std::snprintf(digits, sizeof digits, "%s%02x", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                  uuid.bytes[i]);
    text += digits;
  }
  return text;
}

}  // namespace

std::vector<Description> visible_devices() {
  std::vector<Description> all;
  const Api* api = driver();
  if (api == nullptr) return all;
  const auto check = [&](Result result, const char* function) {
    if (result != 0) raise(*api, result, function);
  };
  int count = 0;
  check(api->count(&count), "cuDeviceGetCount");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    char name[256] = {}, bus_id[32] = {};
    Uuid uuid = {};
    check(api->get(&device, ordinal), "cuDeviceGet");
    check(api->name(name, sizeof name, device), "cuDeviceGetName");
    check(api->uuid(&uuid, device), "cuDeviceGetUuid");
    check(api->bus_id(bus_id, sizeof bus_id, device), "cuDeviceGetPCIBusId");
    all.push_back({ordinal, name, text_of(uuid), bus_id});
  }
  return all;
}

Device::Device(int ordinal) : api_(driver_or_throw()), ordinal_(ordinal) {
  int count = 0;
  check(api_.count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count)
    throw Error("This process sees " + std::to_string(count) + " GPUs. Received: number " + std::to_string(ordinal));
  check(api_.get(&device_, ordinal), "cuDeviceGet");
  check(api_.retain_context(&context_, device_), "cuDevicePrimaryCtxRetain");
}

Device::~Device() {
  api_.release_context(device_);
}

void Device::check(Result result, const char* function) const {
  if (result != 0) raise(api_, result, function);
}

void Device::check_owns(Pointer data, const std::string& what) const {
  unsigned type = 0;
  int ordinal = -1;
  const Result known = api_.pointer_attribute(&type, kMemoryType, data);
  if (known != kInvalidValue) check(known, "cuPointerGetAttribute");
  if (known == kInvalidValue || type != kDeviceMemory)
    throw Error(what + " is not in a GPU's memory. Expected a tensor on GPU " + std::to_string(ordinal_) + ".");
  check(api_.pointer_attribute(&ordinal, kDeviceOrdinal, data), "cuPointerGetAttribute");
  if (ordinal != ordinal_)
    throw Error(what + " is on another GPU than its plan. Expected GPU " + std::to_string(ordinal_) +
                ". Received: GPU " + std::to_string(ordinal));
}

Current::Current(const Device& device) : api_(device.api()) {
  device.check(api_.push_context(device.context()), "cuCtxPushCurrent");
}

Current::~Current() {
  ContextHandle before = nullptr;
  api_.pop_context(&before);
}

Event::Event(const Device& device) : device_(device) {
  const Current current(device_);
  device_.check(device_.api().create_event(&handle_, kNoTiming), "cuEventCreate");
}

Event::~Event() {
  device_.api().destroy_event(handle_);
}

void Event::record(StreamHandle stream) {
  device_.check(device_.api().record_event(handle_, stream), "cuEventRecord");
}

bool Event::is_over() const {
  const Result result = device_.api().query_event(handle_);
  if (result != kNotReady) device_.check(result, "cuEventQuery");
  return result == 0;
}

void Event::make_wait(StreamHandle stream) const {
  device_.check(device_.api().make_stream_wait(stream, handle_, 0), "cuStreamWaitEvent");
}

Stream::Stream(const Device& device) : device_(device) {
  constexpr int highest = -5;  // the driver takes the highest that there is
  const Current current(device_);
  device_.check(device_.api().create_stream(&handle_, kNonBlockingStream, highest), "cuStreamCreateWithPriority");
}

Stream::~Stream() {
  device_.api().destroy_stream(handle_);
}

bool Stream::is_idle() const {
  const Result result = device_.api().query_stream(handle_);
  if (result != kNotReady) device_.check(result, "cuStreamQuery");
  return result == 0;
}

std::shared_ptr<std::byte> pages(size_t nbytes) {
  void* memory = std::aligned_alloc(page_size(), whole_pages(nbytes));
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [](std::byte* p) { std::free(p); }};
}

Pinned::Pinned(const Device& device, std::byte* data, size_t nbytes) : device_(device) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  begin_ = data - address % page_size();
  nbytes_ = whole_pages(address % page_size() + nbytes);
  const Current current(device_);
  if (const Result result = device_.api().pin(begin_, nbytes_, kPortable); result != 0)
    raise<NotPinned>(device_.api(), result, "cuMemHostRegister");
  all_pinned += nbytes_;
}

Pinned::~Pinned() {
  device_.api().unpin(begin_);
  all_pinned -= nbytes_;
}

size_t pinned_bytes() {
  return all_pinned;
}

Buffer::Buffer(const Device& device, size_t nbytes) : device_(device), nbytes_(nbytes) {
  const Current current(device_);
  device_.check(device_.api().allocate(&data_, nbytes), "cuMemAlloc");
}

Buffer::~Buffer() {
  ContextHandle before = nullptr;
  if (device_.api().push_context(device_.context()) != 0) return;
  device_.api().free(data_);
  device_.api().pop_context(&before);
}

double measure_speed(const Device& device, const Stream& stream, size_t nbytes, const std::function<void()>& copy) {
  constexpr int copies = 4, times = 3;
  constexpr double limit_seconds = 10;
  Event event(device);
  double best = 0;
  for (int time = 0; time <= times; ++time) {  // the first one warms up
    const auto begin = Clock::now();
    for (int i = 0; i < copies; ++i) copy();
    event.record(stream.handle());
    while (!event.is_over())
      if (seconds_since(begin) > limit_seconds) throw Timeout("The GPU does not do what it is given.");
    if (time > 0) best = std::max(best, copies * static_cast<double>(nbytes) / seconds_since(begin));
  }
  return best;
}

Speeds measure_speeds(int ordinal, size_t nbytes) {
  const Device device(ordinal);
  const Current current(device);
  const std::shared_ptr<std::byte> host = pages(nbytes);
  std::memset(host.get(), 0, nbytes);  // so that the pages are there
  const Pinned pinned(device, host.get(), nbytes);
  const Buffer buffer(device, nbytes);
  const Stream stream(device);
  const Api& api = device.api();
  const auto to_host = [&] {
    device.check(api.copy_to_host(host.get(), buffer.data(), nbytes, stream.handle()), "cuMemcpyDtoHAsync");
  };
  const auto to_device = [&] {
    device.check(api.copy_to_device(buffer.data(), host.get(), nbytes, stream.handle()), "cuMemcpyHtoDAsync");
  };
  return {measure_speed(device, stream, nbytes, to_host), measure_speed(device, stream, nbytes, to_device)};
}

}  // namespace keras_hpc::device
