// SPDX-License-Identifier: Apache-2.0
// What this rank is doing in a team, for the watchdog (keras_hpc/watchdog.py), which asks from a thread of its own: how
// many calls it has begun, and which of its waits have become long.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <vector>

#include "common/waiting.hpp"

namespace keras_hpc {

// A wait that takes long.
struct Stall {
  std::string what;     // "plan NUMBER NAME", "allreduce", "collective" or "exchange"
  uint64_t number = 0;  // the step of the plan, or which of the team's calls of this kind it is
  std::string detail;   // the tensor, or the name of the collective
  int tensor = -1;      // its number; -1: all of them
  // Ranks of the team that are awaited, as far as this rank sees. Called by other threads.
  std::function<std::vector<int>()> missing;
  Clock::time_point since = Clock::now();
};

class Activity {
 public:
  explicit Activity(double stall_seconds) : stall_seconds_(stall_seconds) {}

  // A wait is known as long as it has a note.
  class Note {
   public:
    Note(Activity& activity, Stall stall);
    ~Note();
    Note(const Note&) = delete;
    Note& operator=(const Note&) = delete;
    void resolve() { resolved_ = true; }  // what was awaited has come

   private:
    Activity& activity_;
    std::list<Stall>::iterator place_;
    bool resolved_ = false;
  };

  // Calls `f` with each wait that has taken longer than stall_seconds. No wait ends meanwhile.
  void for_each_stall(const std::function<void(const Stall&)>& f) const;
  // Those that came to a good end since the last call.
  std::vector<Stall> take_resolved();

  std::atomic<uint64_t> calls{0};        // allreduces of arrays that this rank has begun
  std::atomic<uint64_t> collectives{0};  // broadcasts, allgathers and barriers
  std::atomic<uint64_t> exchanges{0};    // starts of exchanges

 private:
  const double stall_seconds_;
  mutable std::mutex mutex_;
  std::list<Stall> waits_;
  std::vector<Stall> resolved_;
};

}  // namespace keras_hpc
