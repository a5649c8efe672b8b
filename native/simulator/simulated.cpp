// SPDX-License-Identifier: Apache-2.0
#include "simulator/simulated.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <simgrid/s4u.hpp>

#include "common/waiting.hpp"

namespace keras_hpc {
namespace simulated {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kShortest = 1e-8;     // so that time goes on
constexpr double kTogether = 1e-6;     // work of less than this is put together
constexpr double kPollSeconds = 1e-6;  // between two looks of a thread that spins

// All ranks share one thread of the machine.
struct Rank {
  double owed = 0;
  double wake_at = kNever;
};

Rank& mine() {
  static std::map<long, Rank> ranks;
  return ranks[simgrid::s4u::this_actor::get_pid()];
}

void wait(double seconds) {
  sleep(std::max(kShortest, std::min(seconds, mine().wake_at - now())));
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
  const double due = owed;
  owed = 0;
  sleep(due);
}

void wake_at(double time) {
  mine().wake_at = time;
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
  simulated::wait(seconds);
}

void relax() {
  simulated::wait(simulated::kPollSeconds);
}

void yield() {
  simulated::wait(simulated::kPollSeconds);
}

}  // namespace keras_hpc
