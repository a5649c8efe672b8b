// SPDX-License-Identifier: Apache-2.0
#include "common/waiting.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cmath>
#include <optional>

#include "common/error.hpp"

namespace keras_hpc {
namespace {

// Not FUTEX_PRIVATE: the word may be shared between processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

constexpr double kNapSeconds = 1e-3;  // less is a nap

// Lets this thread's naps end on time: the kernel may else let them last 50 us longer, to wake several threads at once.
class OnTime {
 public:
  OnTime() : slack_(prctl(PR_GET_TIMERSLACK)) {
    if (slack_ > 1) prctl(PR_SET_TIMERSLACK, 1UL);
  }
  ~OnTime() {
    if (slack_ > 1) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_));
  }
  OnTime(const OnTime&) = delete;
  OnTime& operator=(const OnTime&) = delete;

 private:
  const int slack_;  // ns
};

}  // namespace

Clock::time_point Clock::now() {
  return std::chrono::steady_clock::now();
}

void Bell::ring() {
  // Pairs with the fence of Sleeper.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake();
}

void Bell::wake() {
  if (!has_sleepers()) return;
  rings.fetch_add(1, std::memory_order_seq_cst);
  futex(rings, FUTEX_WAKE, INT_MAX, nullptr);
}

void Bell::sleep(uint32_t seen, double seconds) {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(seconds);
  timeout.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  std::optional<OnTime> on_time;
  if (seconds < kNapSeconds) on_time.emplace();
  futex(rings, FUTEX_WAIT, seen, &timeout);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void yield() {
  sched_yield();
}

Patience patience_for(int ranks, int cores, bool same_scheduler_group) {
  if (ranks <= cores) return {};
  return {0.0, same_scheduler_group ? 50 : 0};
}

Patience parse_patience(const std::string& name) {
  if (name == "spin") return {0.0, 0, Patience::Then::spin};
  if (name == "yield") return {0.0, 0, Patience::Then::yield};
  if (name == "sleep") return {0.0, 0};
  throw Error("Unknown way to wait. Expected spin, yield or sleep. Received: " + name);
}

}  // namespace keras_hpc
