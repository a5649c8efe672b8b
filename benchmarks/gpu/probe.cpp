// SPDX-License-Identifier: Apache-2.0
// What two processes that share a GPU can do with it, through the driver's functions alone: what this project's ways to
// reduce gradients are built on, or might be. Prints one JSON object a line; benchmarks/gpu/report.py makes a table.
//
//   g++ -O2 -std=c++17 -Inative benchmarks/gpu/probe.cpp -o probe -ldl -lpthread && ./probe [tiny]
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "device/api.hpp"

using namespace keras_hpc::device;

namespace {

struct IpcHandle {
  char reserved[64];
};
constexpr unsigned kMapped = 2, kGreaterOrEqual = 0, kLazyPeer = 1;

#define PROBE_API(X)                                                                                     \
  X(wait_value, "cuStreamWaitValue64_v2", Result(StreamHandle, Pointer, unsigned long long, unsigned))   \
  X(write_value, "cuStreamWriteValue64_v2", Result(StreamHandle, Pointer, unsigned long long, unsigned)) \
  X(host_pointer, "cuMemHostGetDevicePointer_v2", Result(Pointer*, void*, unsigned))                     \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2", Result(Pointer to, Pointer from, size_t, StreamHandle))      \
  X(ipc_export, "cuIpcGetMemHandle", Result(IpcHandle*, Pointer))                                        \
  X(ipc_open, "cuIpcOpenMemHandle_v2", Result(Pointer*, IpcHandle, unsigned))                            \
  X(ipc_close, "cuIpcCloseMemHandle", Result(Pointer))                                                   \
  X(record_context, "cuCtxRecordEvent", Result(ContextHandle, EventHandle))                              \
  X(make_context_wait, "cuCtxWaitEvent", Result(ContextHandle, EventHandle))

struct Table : Api {
#define DECLARE(name, symbol, type) std::add_pointer_t<type> name = nullptr;
  PROBE_API(DECLARE)
} api;

void check(Result result, const char* what) {
  if (result == 0) return;
  const char* name = "?";
  api.error_name(result, &name);
  std::fprintf(stderr, "probe: %s: %s\n", what, name);
  _exit(3);
}
#define CHECK(call) check(api.call, #call)

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}
double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

// What both processes see.
struct alignas(64) Flag {
  std::atomic<uint64_t> value;
};
struct Shared {
  std::atomic<int> arrived, left;
  Flag flags[2];  // at the beginning of a page of their own, which is pinned
  char rest[4096];
  double results[16];
  IpcHandle handle;
};
Shared* shared;
std::byte* memory;  // half of it is each process's
size_t MiB = 1 << 20, large = 256 * MiB;
int repeats = 200;

void barrier() {
  static int times = 0;
  ++times;
  shared->arrived.fetch_add(1);
  while (shared->arrived < 2 * times) usleep(50);
}

void say(const char* probe, const std::string& what, double value, const char* unit, const char* target = "",
         int holds = -1) {
  std::printf(
      "{\"probe\": \"%s\", \"what\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"target\": \"%s\", \"holds\": %s}\n",
      probe, what.c_str(), value, unit, target,
      holds < 0 ? "null"
      : holds   ? "true"
                : "false");
  std::fflush(stdout);
}

// This process on the GPU.
struct Gpu {
  ContextHandle context = nullptr;
  StreamHandle stream = nullptr;
  EventHandle event = nullptr;
  Gpu() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) std::fprintf(stderr, "probe: no libcuda.so.1\n"), _exit(2);
#define BIND(name, symbol, type) *reinterpret_cast<void**>(&api.name) = dlsym(library, symbol);
    KERAS_HPC_DEVICE_API(BIND)
    PROBE_API(BIND)
    int device = 0;
    CHECK(initialize(0));
    CHECK(get(&device, 0));
    CHECK(retain_context(&context, device));
    CHECK(push_context(context));
    CHECK(create_stream(&stream, kNonBlockingStream, 0));
    CHECK(create_event(&event, kNoTiming));
  }
  Pointer allocate(size_t n) {
    Pointer data = 0;
    CHECK(allocate(&data, n));
    return data;
  }
  void finish() {
    CHECK(record_event(event, stream));
    while (true) {
      const Result result = api.query_event(event);
      if (result == 0) return;
      if (result != kNotReady) check(result, "cuEventQuery");
    }
  }
  // Bytes per second of what `copy` queues.
  double rate(size_t nbytes, const std::function<void()>& copy) {
    const int times = static_cast<int>(std::max<size_t>(2, std::min<size_t>(64, large / nbytes)));
    copy();
    finish();
    const auto begin = Clock::now();
    for (int i = 0; i < times; ++i) copy();
    finish();
    return times * static_cast<double>(nbytes) / seconds_since(begin);
  }
};

// Two processes that share `shared` and `memory`; false if one of them did not end well, or not in time.
bool pair(const std::function<void(int)>& work, double limit_seconds = 60, bool may_be_killed = false) {
  std::memset(static_cast<void*>(shared), 0, sizeof *shared);
  pid_t children[2];
  for (int k = 0; k < 2; ++k)
    if ((children[k] = fork()) == 0) {
      work(k);
      std::fflush(stdout);
      _exit(0);
    }
  const auto begin = Clock::now();
  bool well = true;
  for (int k = 0; k < 2; ++k) {
    int status = 0;
    while (waitpid(children[k], &status, WNOHANG) == 0) {
      if (seconds_since(begin) > limit_seconds) kill(children[k], SIGKILL), well = false;
      usleep(1000);
    }
    if (status != 0 && !(may_be_killed && k == 0)) well = false;
  }
  return well;
}

void pin(int k, size_t n) {
  CHECK(pin(memory + k * large, n, kPortable));
}

// A page of flags, and where the device finds it.
Pointer map_flags() {
  const auto page = reinterpret_cast<uintptr_t>(shared->flags) / 4096 * 4096;
  CHECK(pin(reinterpret_cast<void*>(page), 8192, kPortable | kMapped));
  Pointer at = 0;
  CHECK(host_pointer(&at, reinterpret_cast<void*>(page), 0));
  return at + (reinterpret_cast<uintptr_t>(shared->flags) - page);
}

void p1_registering() {
  const bool works = pair([](int k) {
    Gpu gpu;
    std::memset(memory + k * large, 1, large);  // its pages are near who touches them first
    barrier();
    const auto begin = Clock::now();
    pin(k, large);
    shared->results[k] = seconds_since(begin) / (static_cast<double>(large) / (1 << 30));
    barrier();
    CHECK(unpin(memory + k * large));
  });
  const double slowest = std::max(shared->results[0], shared->results[1]);
  say("P1", "pinning shared memory, 2 processes", works ? slowest : -1, "s/GiB", "works, <= 1", works && slowest <= 1);
}

void p2_copies() {
  for (const size_t n : {MiB, 4 * MiB, 16 * MiB, large})
    for (const bool together : {false, true}) {
      const bool works = pair([&](int k) {
        Gpu gpu;
        pin(k, n);
        const Pointer data = gpu.allocate(n);
        for (const int back : {0, 1}) {
          barrier();
          if (k == 0 || together)
            shared->results[2 * back + k] = gpu.rate(n, [&] {
              back ? CHECK(copy_to_device(data, memory + k * large, n, gpu.stream))
                   : CHECK(copy_to_host(memory + k * large, data, n, gpu.stream));
            });
          barrier();
        }
      });
      for (const int back : {0, 1}) {
        const double rate = shared->results[2 * back] + (together ? shared->results[2 * back + 1] : 0);
        say("P2",
            std::to_string(n >> 10) + " KiB " + (back ? "to the GPU" : "to the host") +
                (together ? ", 2 together" : ", alone"),
            works ? rate / 1e9 : -1, "GB/s");
      }
    }
}

void p3_flags() {
  const bool works = pair([](int k) {
    if (k == 1) return;
    Gpu gpu;
    const Pointer flags = map_flags();
    std::vector<double> around, one_way;
    for (int i = 1; i <= repeats; ++i) {
      const auto u = static_cast<uint64_t>(i);
      CHECK(wait_value(gpu.stream, flags, u, kGreaterOrEqual));
      CHECK(write_value(gpu.stream, flags + sizeof(Flag), u, 0));
      usleep(100);  // until it waits
      const auto begin = Clock::now();
      shared->flags[0].value = u;
      while (shared->flags[1].value < u) {
      }
      around.push_back(seconds_since(begin));
      gpu.finish();
    }
    for (int i = 1; i <= repeats; ++i) {
      const auto u = static_cast<uint64_t>(repeats + i);
      const auto begin = Clock::now();
      CHECK(write_value(gpu.stream, flags + sizeof(Flag), u, 0));
      while (shared->flags[1].value < u) {
      }
      one_way.push_back(seconds_since(begin));
    }
    shared->results[0] = 1e6 * median(around);
    shared->results[1] = 1e6 * median(one_way);
  });
  const double around = works ? shared->results[0] : -1, one_way = works ? shared->results[1] : -1;
  say("P3", "store by the CPU, the stream goes on and writes, the CPU sees it", around, "us", "<= 20",
      works && around <= 20);
  say("P3", "write by an idle stream until the CPU sees it", one_way, "us", "<= 10", works && one_way <= 10);
}

void p4_blocked_neighbour() {
  const bool works = pair([](int k) {
    Gpu gpu;
    const Pointer flags = map_flags();
    const Pointer data = gpu.allocate(16 * MiB);
    const auto kernels = [&] { CHECK(set_words(data, 7, 4 * MiB, gpu.stream)); };
    barrier();
    if (k == 1) shared->results[0] = gpu.rate(16 * MiB, kernels);
    barrier();
    if (k == 0) CHECK(wait_value(gpu.stream, flags, 1, kGreaterOrEqual));
    usleep(20000);
    barrier();
    if (k == 1) {
      shared->results[1] = gpu.rate(16 * MiB, kernels);
      shared->flags[0].value = 1;
    }
    gpu.finish();
  });
  const double part = works ? shared->results[1] / shared->results[0] : -1;
  say("P4", "kernels while another process is blocked in WaitValue, against alone", 100 * part, "%", ">= 95",
      part >= 0.95);
}

void p5_killed_neighbour() {
  const bool works = pair(
      [](int k) {
        Gpu gpu;
        const Pointer flags = map_flags();
        if (k == 0) CHECK(wait_value(gpu.stream, flags, 1, kGreaterOrEqual));
        usleep(20000);
        barrier();
        if (k == 0) {
          raise(SIGKILL);
        } else {
          const auto begin = Clock::now();
          const Pointer data = gpu.allocate(MiB);
          for (int i = 0; i < repeats; ++i) {
            CHECK(set_words(data, 7, MiB / 4, gpu.stream));
            gpu.finish();
          }
          if (fork() == 0) {  // a new one, which has nothing of this one's context
            execl("/proc/self/exe", "probe", "start", nullptr);
            _exit(4);
          }
          int status = 0;
          wait(&status);
          if (status != 0) _exit(5);
          shared->results[0] = seconds_since(begin);
        }
      },
      60, true);
  const double took = works ? shared->results[0] : -1;
  say("P5", "a process blocked in WaitValue is killed; another goes on, a new one starts", took, "s", "<= 5",
      works && took <= 5);
}

void p6_ipc() {
  const bool works = pair([](int k) {
    Gpu gpu;
    const Pointer mine = gpu.allocate(16 * MiB), other = gpu.allocate(16 * MiB);
    if (k == 0) CHECK(ipc_export(&shared->handle, mine));
    barrier();
    if (k == 1) {
      shared->results[0] = gpu.rate(16 * MiB, [&] { CHECK(copy_on_device(mine, other, 16 * MiB, gpu.stream)); });
      Pointer theirs = 0;
      CHECK(ipc_open(&theirs, shared->handle, kLazyPeer));
      shared->results[1] = gpu.rate(16 * MiB, [&] { CHECK(copy_on_device(mine, theirs, 16 * MiB, gpu.stream)); });
      CHECK(ipc_close(theirs));
    }
    barrier();
  });
  const double part = works ? shared->results[1] / shared->results[0] : -1;
  say("P6", "copies from another process's memory (IPC), against inside", 100 * part, "%", ">= 80", part >= 0.8);
}

void p7_context_events() {
  const bool works = pair([](int k) {
    if (k == 1) return;
    Gpu gpu;
    if (api.record_context == nullptr || api.make_context_wait == nullptr) _exit(6);
    StreamHandle second = nullptr;
    CHECK(create_stream(&second, kNonBlockingStream, 0));
    const size_t n = 16 * MiB;
    const Pointer data = gpu.allocate(n);
    pin(0, n);
    int wrong = 0;
    std::vector<double> calls;
    for (int i = 1; i <= 20; ++i) {
      for (int j = 0; j < 8; ++j) CHECK(set_words(data, static_cast<unsigned>(100 * i + j), n / 4, gpu.stream));
      const auto begin = Clock::now();
      CHECK(record_context(gpu.context, gpu.event));
      CHECK(make_context_wait(gpu.context, gpu.event));
      calls.push_back(1e9 * seconds_since(begin) / 2);
      CHECK(copy_to_host(memory, data, n, second));
      std::swap(second, gpu.stream);
      gpu.finish();
      std::swap(second, gpu.stream);
      unsigned last;
      std::memcpy(&last, memory + n - 4, 4);
      wrong += last != static_cast<unsigned>(100 * i + 7);
    }
    shared->results[0] = median(calls);
    shared->results[1] = wrong;
  });
  say("P7", "cuCtxRecordEvent and cuCtxWaitEvent, each call", works ? shared->results[0] : -1, "ns");
  say("P7", "values out of order behind them, of 20", works ? shared->results[1] : -1, "", "0",
      works && shared->results[1] == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  if (how == "start") {
    Gpu gpu;
    gpu.finish();
    return 0;
  }
  if (how == "tiny") MiB = 4096, large = 16 * MiB, repeats = 5;
  shared =
      static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const int file = memfd_create("probe", 0);
  if (ftruncate(file, static_cast<off_t>(2 * large)) != 0) return 1;
  memory = static_cast<std::byte*>(mmap(nullptr, 2 * large, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  p1_registering();
  p2_copies();
  p3_flags();
  p4_blocked_neighbour();
  p5_killed_neighbour();
  p6_ipc();
  p7_context_events();
}
