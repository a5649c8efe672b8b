// SPDX-License-Identifier: Apache-2.0
// A GPU, and what of it a plan owns: streams, events, pinned memory.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "device/api.hpp"

namespace keras_hpc::device {

// A call of the driver failed. What the device was given before may not be done.
struct DriverError : Error {
  using Error::Error;
};

// The driver does not pin this memory. It can copy it nevertheless.
struct NotPinned : DriverError {
  using DriverError::DriverError;
};

struct Description {
  int ordinal;  // among those that this process sees
  std::string name, uuid, bus_id;
};
// Of all GPUs that this process sees; none without a driver.
std::vector<Description> visible_devices();

class Device {
 public:
  // By its number among those that this process sees. Throws Error if there is none, or if it cannot be opened.
  explicit Device(int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Api& api() const { return api_; }
  int ordinal() const { return ordinal_; }
  int handle() const { return device_; }
  ContextHandle context() const { return context_; }
  // Throws DriverError, which names the function and the reason.
  void check(Result result, const char* function) const;
  // Throws Error unless it is memory of this device.
  void check_owns(Pointer data, const std::string& what) const;

 private:
  const Api& api_;
  const int ordinal_;
  int device_ = 0;
  ContextHandle context_ = nullptr;
};

// The device is the one that this thread's calls are about, for as long as this lives.
class Current {
 public:
  explicit Current(const Device& device);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Api& api_;
};

class Event {
 public:
  explicit Event(const Device& device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(StreamHandle stream);
  // What was on the stream when it was recorded has been done; true, too, if it never was recorded.
  bool is_over() const;
  void make_wait(StreamHandle stream) const;  // what comes to the stream from now on, until it is over

 private:
  const Device& device_;
  EventHandle handle_ = nullptr;
};

// Never waits for the default stream, nor that for it.
class Stream {
 public:
  explicit Stream(const Device& device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  StreamHandle handle() const { return handle_; }
  bool is_idle() const;

 private:
  const Device& device_;
  StreamHandle handle_ = nullptr;
};

// Memory of the device. Making and freeing it may wait for the device: not inside of a step.
class Buffer {
 public:
  Buffer(const Device& device, size_t nbytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  Pointer data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  const Device& device_;
  const size_t nbytes_;
  Pointer data_ = 0;
};

// Whole pages of the host's memory, to be pinned. Throws std::bad_alloc.
std::shared_ptr<std::byte> pages(size_t nbytes);

// Memory of the host that the device reads and writes by itself, while the host goes on.
class Pinned {
 public:
  // Whole pages around the bytes.
  Pinned(const Device& device, std::byte* data, size_t nbytes);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  const Device& device_;
  std::byte* begin_;
  size_t nbytes_;
};
// That this process has pinned.
size_t pinned_bytes();

// Bytes per second of copies of so many bytes that `copy` gives the stream: the best of some. With the device's
// context. Throws DriverError; Timeout if the device does not answer within seconds.
double measure_speed(const Device& device, const Stream& stream, size_t nbytes, const std::function<void()>& copy);
// Bytes per second between a device and pinned memory of the host, of copies of so many bytes: the best of some.
struct Speeds {
  double to_host, to_device;
};
// Takes tens of milliseconds.
Speeds measure_speeds(int ordinal, size_t nbytes);

}  // namespace keras_hpc::device
