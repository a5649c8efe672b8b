// SPDX-License-Identifier: Apache-2.0
#include "engine/trace.hpp"

#include <mutex>
#include <utility>

namespace keras_hpc::trace {
namespace {

std::mutex mutex;
std::vector<Event> events;

double seconds(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

}  // namespace

std::atomic<bool> enabled{false};

void record(std::string name, const char* kind, int team, Clock::time_point begin) {
  const auto end = Clock::now();
  const std::lock_guard lock(mutex);
  events.push_back({std::move(name), kind, team, seconds(begin), seconds(end)});
}

std::vector<Event> take() {
  const std::lock_guard lock(mutex);
  return std::exchange(events, {});
}

}  // namespace keras_hpc::trace
