// SPDX-License-Identifier: Apache-2.0
// What the parts of a team need to know of it.
#pragma once
#include <algorithm>
#include <utility>

#include "common/waiting.hpp"
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

  void ring_node() const {
    for (int r = 0; r < topology->local_size(); ++r)
      if (r != topology->local_rank) bells[r].ring();
    my_bell().ring();  // a thread of this rank may wait, too
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
