// SPDX-License-Identifier: Apache-2.0
// Schedules of an allreduce of which not all ranks need, or give, all: the same messages and sums, without what nobody
// needs. So whoever gets an element gets the same bits. Plain arithmetic.
#pragma once
#include <cstddef>
#include <tuple>
#include <vector>

#include "algorithms/schedule.hpp"

namespace keras_hpc {

enum class Flow : char {
  to_all,
  to_takers,    // each element to the rank that needs it
  from_givers,  // each element from the rank that gives it, to all; the others hold what changes nothing in a sum
};

// Neighbouring elements that one rank alone needs, or gives. Of those in none of them nothing travels.
struct Extent {
  static constexpr int kEverybody = -1;

  size_t begin, end;
  int peer;  // index among the ranks that take part, or kEverybody

  bool operator<(const Extent& other) const {
    return std::tie(begin, end, peer) < std::tie(other.begin, other.end, other.peer);
  }
};

struct Partial {
  Flow flow = Flow::to_all;
  std::vector<Extent> extents = {};  // ascending

  bool operator<(const Partial& other) const { return std::tie(flow, extents) < std::tie(other.flow, other.extents); }
};

// What is left of the schedule of rank `me`.
Schedule partial(const std::vector<Schedule>& of_ranks, int me, size_t count, const Partial& how);

}  // namespace keras_hpc
