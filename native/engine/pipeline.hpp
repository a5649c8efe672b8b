// SPDX-License-Identifier: Apache-2.0
// Pipelined steps: each applies the average that the step before it has started, so a reduction has a whole step's
// time.
//
// A step starts all tensors of its plan and waits for all, as always. What it gets back depends on where training is:
//   synchronous            the average of this step; one update
//   first pipelined step   nothing yet; no update
//   pipelined              the average of the step before; one update
//   synchronous again      the average of the step before, and then, from second(), that of this one; two updates
// Every gradient is applied exactly once. The plan's tensors live in its segment (Plan::memory), which holds what is on
// its way: one copy, and the step's own buffers hold the other.
#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "engine/plan.hpp"

namespace keras_hpc {

class Team;

class Pipeline {
 public:
  Pipeline(Team& team, Plan& plan);

  // The next `synchronous` steps are synchronous, the `pipelined` after them pipelined, and the rest synchronous again.
  void set_schedule(uint64_t synchronous, uint64_t pipelined);

  // One step: start of every tensor, which must stay where it is; then wait of every tensor, or wait_all_async, after
  // which the buffers hold what the first update applies.
  void start(int tensor, void* data, double weight);
  void wait(int tensor);
  // Calls `done` when it is so, from a thread of the engine or this one. False if the team has no thread.
  using Done = void (*)(void* arg, const char* error);
  bool wait_all_async(Done done, void* arg);
  // How many updates the step makes, once a tensor has been started: 0, 1 or 2.
  int updates() const { return updates_; }
  // What the second update applies, into one buffer for each tensor.
  void second(int tensor, void* data);
  bool second_async(const std::vector<void*>& data, Done done, void* arg);

  // The average that is outstanding, into one buffer for each tensor; false if there is none. `keep` leaves it
  // outstanding. Collective in effect: it waits for the other ranks' parts.
  bool take(const std::vector<void*>& data, bool keep);
  // Makes an average outstanding again that `take` gave in an earlier process. Between steps; on every rank.
  void put(const std::vector<const void*>& data);
  bool outstanding() const { return outstanding_; }
  bool is_of(const Plan& plan) const { return &plan_ == &plan; }

 private:
  struct Continuation;

  std::byte* memory(int tensor) const;
  size_t nbytes(int tensor) const { return plan_.layout().range(tensor).size(); }
  int count() const { return plan_.layout().tensor_count(); }
  bool early() const { return synchronous_now_ && !outstanding_; }  // tensors are started as they come
  void begin_turn();
  void turn(int tensor);
  void turn_all();
  void start_memory(int tensor);
  void land();  // blocks until the memory holds an average
  void take_second(int tensor, void* data);
  bool land_async(std::function<void()> then, Done done, void* arg);

  Team& team_;
  Plan& plan_;
  std::shared_ptr<std::byte> memory_;
  std::mutex mutex_;
  std::vector<void*> data_;
  std::vector<char> awaited_;  // tensors that were started and not waited for
  double weight_ = 1;
  int started_ = 0;
  int taken_ = 0;
  uint64_t step_ = 0;
  uint64_t first_ = 0, end_ = 0;  // the pipelined steps
  bool synchronous_now_ = true;   // this step
  int turned_ = 0;                // tensors of this step, that were waited for
  bool outstanding_ = false;      // the memory holds an average, or will, that no update has applied
  bool landed_ = false;           // it does
  int updates_ = 0;
};

}  // namespace keras_hpc
