// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <sched.h>

#include <cstdint>

#include "common/waiting.hpp"

namespace keras_hpc {

// Numbers of cores, more than fit into one cpu_set_t.
struct Cores {
  static constexpr int kSets = 8;
  cpu_set_t sets[kSets];

  static Cores mine();
  void add(const Cores& other) { CPU_OR_S(sizeof sets, sets, sets, other.sets); }
  int count() const { return CPU_COUNT_S(sizeof sets, sets); }
};

// Where a rank runs, in memory that the ranks of its node share.
struct Seat {
  Cores cores;
  int64_t scheduler_group;
  double quota;  // of cores, that its control group has
  uint64_t quota_of;

  static Seat mine();
};

// How ranks of a node wait for each other, with the cores that they have together.
Patience patience_of(const Seat* seats, int ranks);

}  // namespace keras_hpc
