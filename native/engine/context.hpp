// SPDX-License-Identifier: Apache-2.0
// What the parts of a team need to know of it.
#pragma once
#include <algorithm>
#include <utility>

#include "common/waiting.hpp"
#include "engine/activity.hpp"
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

  void ring_node() const {
    for (int r = 0; r < topology->local_size(); ++r)
      if (r != topology->local_rank) bells[r].ring();
    my_bell().ring();  // a thread of this rank may wait, too
  }
  Bell& my_bell() const { return bells[topology->local_rank]; }
  // The first rank of the job, of those on this node, that met this fate, or -1.
  int first_with(Fate fate) const {
    for (int r = 0; r < topology->local_size(); ++r)
      if (bells[r].fate == fate) return topology->local_ranks()[static_cast<size_t>(r)];
    return -1;
  }
};

// Waits like wait_for, at most timeout_seconds. After stall_seconds it is a stall, which `describe` puts into words.
template <class Ready, class Polling, class Describe>
bool wait_watched(const TeamContext& team, Ready&& ready, Polling&& polling, Describe&& describe) {
  const auto begin = Clock::now();
  const double first = std::min(team.stall_seconds, team.timeout_seconds);
  if (wait_for(team.patience, team.my_bell(), first, ready, polling)) return true;
  if (first >= team.timeout_seconds) return false;
  Stall stall = describe();
  stall.since = begin;
  Activity::Note note(*team.activity, std::move(stall));
  if (!wait_for(team.patience, team.my_bell(), team.timeout_seconds - first, ready, polling)) return false;
  note.resolve();
  return true;
}

}  // namespace keras_hpc
