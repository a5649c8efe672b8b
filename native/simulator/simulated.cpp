// SPDX-License-Identifier: Apache-2.0
#include "simulator/simulated.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <simgrid/s4u.hpp>
#include <utility>
#include <vector>

#include "common/waiting.hpp"

namespace keras_hpc {
namespace simulated {
namespace {

constexpr double kNever = 1e9;         // seconds
constexpr double kShortest = 1e-8;     // so that time goes on
constexpr double kTogether = 1e-6;     // work of less than this is put together
constexpr double kPollSeconds = 1e-6;  // between two looks of a thread that spins
constexpr double kLongestNap = 50e-6;  // of wait_for; the next one takes as long

// All threads of all ranks share one thread of the machine.
struct Thread {
  double owed = 0;
  double wake_at = kNever;
  double spun_until = -1;
  int looks = 0;  // since then
  std::vector<simgrid::s4u::CommPtr> watched;
};

Thread& mine() {
  static std::deque<Thread> threads(1);  // what it holds stays where it is
  const auto pid = static_cast<size_t>(simgrid::s4u::this_actor::get_pid());
  if (threads.size() <= pid) threads.resize(pid + 1);
  return threads[pid];
}

void wait(double seconds) {
  Thread& thread = mine();
  thread.watched.clear();
  sleep(std::max(kShortest, std::min(seconds, thread.wake_at - now())));
}

// Waits as a thread does that looks every `interval` whether something has come, but looks only when something has.
void wait_looking(double interval, double seconds) {
  std::vector<simgrid::s4u::CommPtr> watched = std::exchange(mine().watched, {});
  const double begin = now(), end = std::min(begin + seconds, mine().wake_at);
  if (end <= begin) return sleep(kShortest);
  if (simgrid::s4u::Comm::wait_any_for(watched, end - begin) < 0) return;
  const double look = begin + interval * std::max(1.0, std::ceil((now() - begin) / interval - 1e-9));
  const double left = std::min(look, mine().wake_at) - now();
  if (left > 0) sleep(left);
}

// A spin loop asks the clock once in kLooks looks. When it has spun for long enough, the rest of them take no time.
void spin() {
  constexpr int kLooks = 16;
  constexpr double kSlack = 1e-9;  // the clock cuts off what is less
  if (mine().watched.empty()) return wait(kPollSeconds);
  if (mine().spun_until == now() && ++mine().looks < kLooks) return;
  const double end = now() + Patience{}.spin_seconds;
  wait_looking(kPollSeconds, Patience{}.spin_seconds + 2 * kSlack);
  if (now() < end) return;
  mine().spun_until = now();
  mine().looks = 0;
}

}  // namespace

Rates rates;

double now() {
  return simgrid::s4u::Engine::get_clock();
}

void sleep(double seconds) {
  simgrid::s4u::this_actor::sleep_for(seconds);
}

void work(double seconds) {
  double& owed = mine().owed;
  owed += seconds;
  if (owed < kTogether) return;
  sleep(std::exchange(owed, 0));
}

void wake_at(double time) {
  mine().wake_at = time;
}

void watch(simgrid::s4u::CommPtr comm) {
  mine().watched.push_back(std::move(comm));
}

}  // namespace simulated

// ---- what common/waiting.cpp is elsewhere

Clock::time_point Clock::now() {
  return time_point(std::chrono::nanoseconds(static_cast<int64_t>(simulated::now() * 1e9)));
}

// One rank on each node, with one thread: nobody sleeps whom another one could wake.
void Bell::ring() {}
void Bell::wake() {}
void Bell::sleep(uint32_t, double seconds) {
  const bool naps_on = seconds >= simulated::kLongestNap && !simulated::mine().watched.empty();
  naps_on ? simulated::wait_looking(seconds, simulated::kNever) : simulated::wait(seconds);
}

void relax() {
  simulated::spin();
}

void yield() {
  simulated::spin();
}

}  // namespace keras_hpc
