// What the two halves of the fake libcuda.so.1 share: the state of the GPU that is not there.
#pragma once
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_gpu.hpp"
#include "fake_sites.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_cuda {

using fake::die;
using fake::ignores;

inline std::mutex world;
inline fake::Memory memory(PROT_NONE);
inline std::map<uintptr_t, size_t> pinned;
inline std::map<int, int> contexts;  // device: how often it was retained
inline std::atomic<int> streams{0}, events{0}, modules{0};
inline std::atomic<int> devices{1}, first_device{0};
inline std::atomic<bool> any_pointer{false}, slow_back{false}, hung{false}, back_hangs{false}, spoiled{false}, no_number{false};
inline std::atomic<bool> pageable{false};  // memory was not to be pinned: copies of other memory are no mistake then
inline std::atomic<int> lost_device{-1}, calls_until_lost{0};
inline thread_local bool in_step = false;
inline thread_local std::vector<int> current;  // devices, the last one is it
inline std::string failing;
inline int failing_after = 0;
inline std::map<std::string, int> calls;
// A thread of the engine, or one that a test has said it of.
inline bool is_in_step() {
  char name[16] = {};
  prctl(PR_GET_NAME, name);
  return in_step || std::strncmp(name, "khpc-", 5) == 0;
}

// A GPU that has fallen off the bus: no call that is about it succeeds any more.
inline bool is_lost() {
  return !current.empty() && current.back() == lost_device && --calls_until_lost < 0;
}

// What each function begins with: its error, if a test has asked for one.
inline int enter(const char* name, bool waits = false) {
  if (waits && is_in_step()) die(std::string(name) + " inside a step: it would wait for the device");
  if (std::strncmp(name, "cuCtx", 5) != 0 && is_lost()) return 999;
  const std::lock_guard lock(world);
  ++calls[name];
  if (failing == name && failing_after-- == 0) return 999;  // CUDA_ERROR_UNKNOWN
  return 0;
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

// What a driver need not notice, and a test must: it is said on stderr, and counted.
inline std::atomic<int> faults{0};
inline void fault(const char* what) {
  ++faults;
  std::fprintf(stderr, "fake GPU: %s\n", what);
}

// What is being copied between the host and the device, from when it was asked for.
class Copies {
 public:
  struct Copy {
    uintptr_t host, device;  // where a stream finds it
    size_t nbytes;
  };
  using Number = std::list<Copy>::iterator;
  static Copies& all() {
    static Copies& copies = *new Copies;
    return copies;
  }
  Number begin(const void* host, const void* device, size_t n) {
    const std::lock_guard lock(mutex_);
    copies_.push_front({reinterpret_cast<uintptr_t>(host), reinterpret_cast<uintptr_t>(device), n});
    return copies_.begin();
  }
  void end(Number copy) {
    const std::lock_guard lock(mutex_);
    copies_.erase(copy);
  }
  // Waits for those from or to an allocation that begins here, which is a mistake if there are any.
  void end_those_of(const void* begin, size_t n, const char* mistake) {
    if (is_copying(begin, n) && lost_device < 0) fault(mistake);  // a lost GPU would copy nothing any more
    while (is_copying(begin, n)) std::this_thread::yield();
  }

 private:
  bool is_copying(const void* begin, size_t n) {
    const auto address = reinterpret_cast<uintptr_t>(begin);
    const auto touches = [&](uintptr_t its, size_t nbytes) { return its < address + n && address < its + nbytes; };
    const std::lock_guard lock(mutex_);
    // Ranks that are threads have both pinned the page in which the memory of one ends and that of the other begins.
    return std::any_of(copies_.begin(), copies_.end(), [&](const Copy& copy) {
      return touches(copy.device, copy.nbytes) ||
             (touches(copy.host, copy.nbytes) && !is_pinned(reinterpret_cast<void*>(copy.host), copy.nbytes));
    });
  }
  std::mutex mutex_;
  std::list<Copy> copies_;
};

struct Stream : fake::Stream {
  Stream() {
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
};

inline Stream& of(void* stream) {
  static Stream& the_default = *new Stream;
  return stream == nullptr ? the_default : *static_cast<Stream*>(stream);
}

struct Event : fake::Event {
  std::vector<fake::Event> of_all;  // recorded on all streams
};

inline void hang() {
  while (hung) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace fake_cuda
