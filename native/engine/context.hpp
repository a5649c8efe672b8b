// SPDX-License-Identifier: Apache-2.0
// What the parts of a team need to know of it.
#pragma once
#include "common/waiting.hpp"
#include "transport/topology.hpp"

namespace keras_hpc {

struct TeamContext {
  int number = 0;
  const Topology* topology = nullptr;
  Bell* bells = nullptr;  // one per local rank
  Patience patience;
  double timeout_seconds = 300;
  double stall_seconds = 30;

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

}  // namespace keras_hpc
