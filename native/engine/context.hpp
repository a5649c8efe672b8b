// SPDX-License-Identifier: Apache-2.0
// What the parts of a team need to know of it.
#pragma once
#include <algorithm>
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
  Bell* bells = nullptr;  // one per local rank
  Patience patience;
  double timeout_seconds = 300;
  double stall_seconds = 30;
  Activity* activity = nullptr;
  Failure* failure = nullptr;
  std::vector<ActivePlans*> active_plans;  // one per lane

  void ring_node() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // see Bell::ring
    wake(topology->local_size());
  }
  // The first `ranks` of the node; after a sequentially consistent store.
  void wake(int ranks) const {
    for (int r = 0; r < ranks; ++r)
      if (r != topology->local_rank) bells[r].wake();
    my_bell().wake();  // a thread of this rank may wait, too
  }
  Bell& my_bell() const { return bells[topology->local_rank]; }
};

// Waits like wait_for, at most timeout_seconds, and while there is use in it. After stall_seconds it is a stall.
template <class Ready>
bool wait_watched(const TeamContext& team, Ready&& ready, const Awaited& awaited) {
  const auto begin = Clock::now();
  const double first = std::min(team.stall_seconds, team.timeout_seconds);
  Lookout lookout(*team.failure);
  const auto look = [&] {
    lookout.look(awaited);
    return awaited.is_outside();
  };
  if (wait_for(team.patience, team.my_bell(), first, ready, look)) return true;
  if (first >= team.timeout_seconds) return false;
  Stall stall = awaited.stall();
  stall.since = begin;
  Activity::Note note(*team.activity, std::move(stall));
  if (!wait_for(team.patience, team.my_bell(), team.timeout_seconds - first, ready, look)) return false;
  note.resolve();
  return true;
}

}  // namespace keras_hpc
