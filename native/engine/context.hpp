// SPDX-License-Identifier: Apache-2.0
// What the parts of a team need to know of it.
#pragma once
#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "common/waiting.hpp"
#include "engine/active_plans.hpp"
#include "engine/activity.hpp"
#include "engine/failure.hpp"
#include "transport/topology.hpp"

namespace keras_hpc {

struct TeamContext {
  int number = 0;
  const Topology* topology = nullptr;
  // One per local rank each: on which its threads sleep, on which who waits for a tensor does, and who waits for rows.
  Bell* bells = nullptr;
  Bell* callers = nullptr;
  Bell* exchangers = nullptr;
  Patience patience;
  double timeout_seconds = 300;
  double stall_seconds = 30;
  Activity* activity = nullptr;
  Failure* failure = nullptr;
  std::vector<ActivePlans*> active_plans;                // one per lane
  const std::atomic<int>* asynchronous_waits = nullptr;  // which a thread of the team completes

  void ring_node() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // see Bell::ring
    for (int r = 0; r < topology->local_size(); ++r)
      if (r != topology->local_rank) bells[r].wake();
    my_bell().wake();  // a thread of this rank may wait, too
  }
  // Wakes another rank that has something to do for a plan now; after a sequentially consistent store. Who waits there
  // for a tensor does it as well as the thread, and need not be woken by it again when it is done. But it is only one.
  void wake(int local_rank) const {
    if (local_rank == topology->local_rank) return;  // who calls this goes on with it
    Bell& caller = callers[local_rank];
    (active_plans.size() == 1 && caller.has_sleepers() ? caller : bells[local_rank]).wake();
  }
  Bell& my_bell() const { return bells[topology->local_rank]; }
};

// Waits like wait_for, at most timeout_seconds, and while there is use in it; a little longer where only other nodes
// can tell who is late. After stall_seconds it is a stall. Where it waits in vain for one that seems to do nothing for
// it, that is the `suspect`.
template <class Ready>
bool wait_watched(const TeamContext& team, Bell& bell, Ready&& ready, const Awaited& awaited, int* suspect = nullptr) {
  const auto begin = Clock::now();
  const double first = std::min(team.stall_seconds, team.timeout_seconds);
  Lookout lookout(*team.failure);
  const auto look = [&] {
    lookout.look(awaited);
    return awaited.is_outside();
  };
  if (wait_for(team.patience, bell, first, ready, look, awaited.is_outside())) return true;
  Stall stall = awaited.stall();
  stall.since = begin;
  Activity::Note note(*team.activity, std::move(stall));
  if (!wait_for(team.patience, bell, team.timeout_seconds - first, ready, look)) {
    constexpr double slice = 0.5;
    int idle = lookout.idle_suspect(awaited);
    WaitedTime time;
    bool is_ready = false;
    const double hearing = lookout.hearing_seconds(awaited);
    for (double left = hearing; idle < 0 && !is_ready && left > 0; left = hearing - time.seconds()) {
      is_ready = wait_for(team.patience, bell, std::min(slice, left), ready, look);
      idle = lookout.idle_suspect(awaited);
    }
    if (!is_ready) {
      lookout.look_at_blame(awaited);
      if (suspect != nullptr) *suspect = idle;
      return false;
    }
  }
  note.resolve();
  return true;
}

}  // namespace keras_hpc
