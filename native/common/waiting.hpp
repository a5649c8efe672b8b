// SPDX-License-Identifier: Apache-2.0
// How a thread waits for another rank of its node: a short spin, then sleep in the kernel (futex). Where ranks
// outnumber the cores, it does not spin but yields a few times, if that can help. For a message of another node it
// yields between its looks, and then naps.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "common/process.hpp"

namespace keras_hpc {

// The time of everything in the engine. A simulator links another one, with its own ways to wait.
struct Clock {
  using time_point = std::chrono::steady_clock::time_point;
  static time_point now();
};

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// How long a wait takes, for who asks at least once a second. The time in which this process was stopped does not
// count, as when a batch system suspends a job: then no other rank is late.
class WaitedTime {
 public:
  double seconds() {
    constexpr double longest = 2;
    const auto now = Clock::now();
    seconds_ += std::min(std::chrono::duration<double>(now - asked_).count(), longest);
    asked_ = now;
    return seconds_;
  }

 private:
  double seconds_ = 0;
  Clock::time_point asked_ = Clock::now();
};

// Atomic doubles have no operator += before C++20.
inline void add(std::atomic<double>& sum, double value) {
  double before = sum.load(std::memory_order_relaxed);
  while (!sum.compare_exchange_weak(before, before + value, std::memory_order_relaxed)) {
  }
}

// Whether a rank still takes part in communication.
enum class Fate : uint32_t { present, left, failed };

// What threads of one rank sleep on. Lies in memory shared by the node; whoever changes something that this rank may be
// waiting for rings it. Ringing costs one load while nobody sleeps.
struct alignas(128) Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;
  // What became of this rank, and, if it failed, through which rank; see engine/failure.hpp.
  std::atomic<Fate> fate;
  std::atomic<int32_t> culprit;
  // Rises about once a second while this rank waits in the engine, or a thread of the engine works for it.
  std::atomic<uint32_t> beats;
  // Of the calls in which MPI lets ranks wait for each other, and does not say for whom: how many this rank has begun,
  // and how many are over here. Equally many on all ranks in the end.
  std::atomic<uint64_t> begun, over;
  ProcessId process;  // written before the team's first barrier

  void ring();
  // The same, for who has just made a sequentially consistent store of what others may wait for.
  void wake();
  bool has_sleepers() const { return sleepers.load(std::memory_order_seq_cst) != 0; }
  // Sleeps until the next ring after `seen` (a value of `rings`), at most `seconds`.
  void sleep(uint32_t seen, double seconds);
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// A thread that is about to sleep on a bell. Who rings from now on wakes it.
class Sleeper {
 public:
  explicit Sleeper(Bell& bell) : bell_(bell) {
    bell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    // Pairs with the fence in ring(): either the ringer sees the sleeper, or the sleeper what the ringer has changed.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    seen_ = bell_.rings.load(std::memory_order_seq_cst);
  }
  ~Sleeper() { bell_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  void sleep(double seconds) { bell_.sleep(seen_, seconds); }

 private:
  Bell& bell_;
  uint32_t seen_;
};

void relax();  // tells the processor that this is a spin loop

// What a thread does while it waits.
struct Patience {
  double spin_seconds = 20e-6;  // an answer that is on its way arrives within it
  int yields = 0;
  enum class Then { sleep, spin, yield } then = Then::sleep;
};

// The patience of ranks that share a node's cores; `same_scheduler_group` of all of them. MPICH's launcher gives each
// rank a session of its own, and with the kernel's autogroup scheduling sched_yield then yields to nobody: there,
// waiting by yielding is a thousand times slower than sleeping.
Patience patience_for(int ranks, int cores, bool same_scheduler_group);

// By name, for measuring: "spin" or "yield" for as long as it takes, or "sleep" at once. Throws Error on another one.
Patience parse_patience(const std::string& name);

void yield();

// Waits until ready() is true or `seconds` have passed; returns ready()'s last value. ready() may do work that makes
// itself true. Before each sleep, and at least once a second, look() is asked: it may throw, and while it returns true
// something outside this node is awaited, which rings no bell: the sleep is brief. `outside`: so it is from the start.
template <class Ready, class Look>
bool wait_for(const Patience& patience, Bell& bell, double seconds, Ready&& ready, Look&& look, bool outside = false) {
  constexpr double slice_seconds = 1.0;
  // To look for a message is work for the kernel anyway, and who sends it may need this core: hosts in containers share
  // them without knowing. One that is on its way arrives within it.
  constexpr double outside_seconds = 50e-6;
  if (ready()) return true;
  const auto begin = Clock::now();
  const double courteous = outside && patience.then == Patience::Then::sleep ? std::min(outside_seconds, seconds) : 0;
  while (seconds_since(begin) < courteous) {
    yield();
    if (ready()) return true;
  }
  const double spin_seconds = courteous > 0 ? 0 : std::min(patience.spin_seconds, seconds);
  while (seconds_since(begin) < spin_seconds) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      relax();
    }
  }
  for (int i = 0; i < patience.yields; ++i) {
    yield();
    if (ready()) return true;
  }
  constexpr double shortest_nap = 2e-6, longest_nap = 50e-6;
  WaitedTime time;
  for (double waited = 0; waited < seconds; waited = time.seconds()) {
    if (patience.then != Patience::Then::sleep) {
      look();
      for (int i = 0; i < 1000; ++i) {
        patience.then == Patience::Then::spin ? relax() : yield();
        if (ready()) return true;
      }
      continue;
    }
    Sleeper sleeper(bell);
    if (ready()) return true;
    const double left = std::max(seconds - waited, 1e-6);
    // Whoever naps for an eighth of what it has waited comes an eighth too late, at most.
    const double nap = std::clamp(seconds_since(begin) / 8, shortest_nap, longest_nap);
    sleeper.sleep(std::min(left, look() ? nap : slice_seconds));
  }
  return ready();
}

}  // namespace keras_hpc
