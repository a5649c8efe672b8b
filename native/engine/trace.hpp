// SPDX-License-Identifier: Apache-2.0
// What happened when: for `init(trace=...)`, and for tests that prove overlap.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "common/waiting.hpp"

namespace keras_hpc::trace {

struct Event {
  std::string name;  // of the tensor or bucket
  const char* kind;  // "start", "reduce", "network", "wait", "exchange", "rows" (until they came), ...
  int team;
  int64_t begin, end;  // nanoseconds of the steady clock
};

extern std::atomic<bool> enabled;

void record(std::string name, const char* kind, int team, Clock::time_point begin);
// Takes out what was recorded so far, as a JSON list of [name, kind, team, begin, end]; "" if it is nothing. As text,
// since whoever writes it down would else make Python objects of it, beside steps that need the same interpreter.
std::string take();

}  // namespace keras_hpc::trace
