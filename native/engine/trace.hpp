// SPDX-License-Identifier: Apache-2.0
// What happened when: for `init(trace=...)`, and for tests that prove overlap.
#pragma once
#include <atomic>
#include <string>
#include <vector>

#include "common/waiting.hpp"

namespace keras_hpc::trace {

struct Event {
  std::string name;  // of the tensor or bucket
  const char* kind;  // "start", "reduce", "network", "wait"
  int team;
  double begin, end;  // seconds of the steady clock
};

extern std::atomic<bool> enabled;

void record(std::string name, const char* kind, int team, Clock::time_point begin);
// Takes out what was recorded so far.
std::vector<Event> take();

}  // namespace keras_hpc::trace
