// What tests tell the fake libcuda.so.1, and ask of it: memory, kernels, errors, what is still there.
#include <cstdio>

#include "fake_cuda.hpp"

using namespace fake_cuda;

EXPORT void fake_reset(int device_count, int delay) {
  const std::lock_guard lock(world);
  devices = device_count;
  first_device = 0;
  fake::delay_us = delay;
  any_pointer = slow_back = pageable = in_step = hung = back_hangs = spoiled = no_number = false;
  failing = "";
  faults = 0;
  lost_device = -1;
  calls.clear();
}
// The GPUs of the node that this process sees.
EXPORT void fake_show(int first, int count) {
  first_device = first;
  devices = count;
}
EXPORT void fake_any_pointer(int yes) {
  any_pointer = yes != 0;
}
// For a framework that computes on the host what it believes to be on a GPU.
EXPORT void fake_let_host() {
  memory.let_host();
}
// This thread is inside a step: what waits for the device is a mistake.
EXPORT void fake_in_step(int yes) {
  in_step = yes != 0;
}
// The call number `after`, from 0, of a function fails.
EXPORT void fake_fail(const char* name, int after) {
  const std::lock_guard lock(world);
  failing = name;
  failing_after = after;
}
// After so many more calls that are about this device, all of them fail.
EXPORT void fake_lose(int device, int after) {
  calls_until_lost = after;
  lost_device = device;
}
// From now on the places are known from which order is asked for: see fake_sites.hpp.
EXPORT void fake_watch(int yes) {
  fake::watch(yes != 0);
}
// Those that were seen, a line each, into `n` bytes.
EXPORT void fake_sites(char* text, size_t n) {
  std::snprintf(text, n, "%s", fake::seen_sites().c_str());
}
// What is asked for from one of them is not done any more; from "": all is. Returns how often that was so before.
EXPORT int fake_ignore(const char* site) {
  return fake::ignore(site);
}
// How often memory was given back while a copy that somebody had asked for was not over.
EXPORT int fake_faults() {
  return faults;
}
// Copies to the device take milliseconds.
EXPORT void fake_slow_back(int yes) {
  slow_back = yes != 0;
}
// A kernel that does not end before fake_hang is called with 0; null: copies to the device do not.
EXPORT void fake_hang(void* stream, int yes) {
  hung = yes != 0;
  back_hangs = hung && stream == nullptr;
  if (hung && stream != nullptr) of(stream).push([] { hang(); });
}
// 1: kernels do nothing; 2: copies within the device give NaN.
EXPORT void fake_spoil(int how) {
  spoiled = how == 1;
  no_number = how == 2;
}
EXPORT int fake_calls(const char* name) {
  const std::lock_guard lock(world);
  return calls[name];
}
// Streams, events, modules, pinned ranges, allocations and contexts that are still there.
EXPORT int fake_left() {
  const std::lock_guard lock(world);
  int left = streams + events + modules + static_cast<int>(pinned.size() + memory.count());
  for (const auto& [device, times] : contexts) left += times;
  return left;
}
// What is pinned is pinned for good, and nobody is to blame.
EXPORT void fake_forget() {
  const std::lock_guard lock(world);
  pinned.clear();
}
EXPORT void* fake_stream() {
  return new Stream;
}
EXPORT void fake_destroy_stream(void* stream) {
  delete static_cast<Stream*>(stream);
}
// Kernels: `n` bytes, which are taken from the host at once, into device memory; and the other way, which waits.
EXPORT void fake_write(void* stream, uint64_t to, const void* from, size_t n) {
  std::byte* device = behind(to, n);
  if (device == nullptr) die("a kernel writes to memory that is not the device's");
  const std::vector<std::byte> copy(static_cast<const std::byte*>(from), static_cast<const std::byte*>(from) + n);
  of(stream).push([=] { std::memcpy(device, copy.data(), n); });
}
EXPORT void fake_read(void* stream, void* to, uint64_t from, size_t n) {
  const std::byte* device = behind(from, n);
  if (device == nullptr) die("a kernel reads memory that is not the device's");
  of(stream).push([=] { std::memcpy(to, device, n); });
  of(stream).finish();
}
// What device memory has now, whatever streams have still to do.
EXPORT void fake_peek(void* to, uint64_t from, size_t n) {
  std::memcpy(to, behind(from, n), n);
}
// How a library copies that takes memory of the device, such as MPI: at once, whatever streams have still to do.
EXPORT void fake_copy_any(void* to, const void* from, size_t n) {
  std::byte* target = memory.behind(reinterpret_cast<uint64_t>(to), n);
  const std::byte* source = memory.behind(reinterpret_cast<uint64_t>(from), n);
  std::memcpy(target == nullptr ? to : target, source == nullptr ? from : source, n);
}
// A kernel that copies, and one that does nothing for a while.
EXPORT void fake_copy(void* stream, uint64_t to, uint64_t from, size_t n) {
  std::byte* target = behind(to, n);
  const std::byte* source = behind(from, n);
  of(stream).push([=] { std::memcpy(target, source, n); });
}
// For a library of kernels, such as fake_nccl.cpp: one to a stream, where streams find memory, this thread's device.
EXPORT void fake_push(void* stream, void (*kernel)(void*), void* argument) {
  need_context("a kernel");
  of(stream).push([=] { kernel(argument); });
}
EXPORT void* fake_behind(uint64_t pointer, size_t n) {
  return behind(pointer, n);
}
EXPORT int fake_current_device() {
  need_context("a library");
  return current.back();
}
EXPORT void fake_take_time(void* stream, int milliseconds) {
  of(stream).push([=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
}
// Waits until the stream has done what it was given.
EXPORT void fake_finish(void* stream) {
  of(stream).finish();
}
EXPORT uint64_t fake_allocate(size_t n, int device) {
  return reinterpret_cast<uint64_t>(memory.allocate(n, device));
}
EXPORT void fake_free(uint64_t pointer) {
  size_t n = 0;
  memory.file_of(pointer, n);
  Copies::all().end_those_of(behind(pointer, n), n, "memory of the device is freed while it is copied");
  memory.free(reinterpret_cast<void*>(pointer));
}
