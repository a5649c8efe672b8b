// What the two halves of the fake libcuda.so.1 share: the state of the GPU that is not there.
#pragma once
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_gpu.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_cuda {

using fake::die;

inline std::mutex world;
inline fake::Memory memory(PROT_NONE);
inline std::map<uintptr_t, size_t> pinned;
inline std::map<int, int> contexts;  // device: how often it was retained
inline std::atomic<int> streams{0}, events{0};
inline std::atomic<int> devices{1}, first_device{0};
inline std::atomic<bool> any_pointer{false}, slow_back{false}, hung{false}, back_hangs{false};
inline std::atomic<bool> pageable{false};  // memory was not to be pinned: copies of other memory are no mistake then
inline thread_local bool in_step = false;
inline std::string failing, dropped;
inline int failing_after = 0;
inline std::map<std::string, int> calls;
inline thread_local std::vector<int> current;  // devices, the last one is it

// A thread of the engine, or one that a test has said it of.
inline bool is_in_step() {
  char name[16] = {};
  prctl(PR_GET_NAME, name);
  return in_step || std::strncmp(name, "khpc-", 5) == 0;
}

// What each function begins with: its error, if a test has asked for one.
inline int enter(const char* name, bool waits = false) {
  if (waits && is_in_step()) die(std::string(name) + " inside a step: it would wait for the device");
  const std::lock_guard lock(world);
  ++calls[name];
  if (failing == name && failing_after-- == 0) return 999;  // CUDA_ERROR_UNKNOWN
  return 0;
}
inline bool drops(const char* what) {
  const std::lock_guard lock(world);
  return dropped == what;
}

inline void need_context(const char* name) {
  if (current.empty()) die(std::string(name) + " without a current context on this thread");
}

// Where streams find `n` bytes of the device; null if they are not the device's.
inline std::byte* behind(uint64_t pointer, size_t n) {
  std::byte* found = memory.behind(pointer, n);
  return found == nullptr && any_pointer ? reinterpret_cast<std::byte*>(pointer) : found;
}

inline bool is_pinned(const void* data, size_t n) {
  const std::lock_guard lock(world);
  const auto address = reinterpret_cast<uintptr_t>(data);
  for (const auto& [begin, nbytes] : pinned)
    if (begin <= address && address + n <= begin + nbytes) return true;
  return false;
}

struct Stream : fake::Stream {
  explicit Stream(bool own) : own(own) {
    const std::lock_guard lock(world);
    all().push_back(this);
  }
  ~Stream() {
    const std::lock_guard lock(world);
    all().erase(std::find(all().begin(), all().end(), this));
  }
  static std::vector<Stream*>& all() {
    static auto& streams = *new std::vector<Stream*>;
    return streams;
  }
  const bool own;  // made by who is tested, not by fake_stream
};

inline Stream& of(void* stream) {
  static Stream& the_default = *new Stream(false);
  return stream == nullptr ? the_default : *static_cast<Stream*>(stream);
}

struct Event : fake::Event {
  bool on_own_stream = false;
  std::vector<fake::Event> of_all;  // recorded on all streams
};

inline void hang() {
  while (hung) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace fake_cuda
