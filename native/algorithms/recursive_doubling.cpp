// SPDX-License-Identifier: Apache-2.0
#include "algorithms/schedule.hpp"

namespace keras_hpc {

Schedule recursive_doubling(int p, int me, size_t count) {
  const Power power(p);
  if (me >= power.ranks) return power.beyond(me, count);
  Schedule steps;
  if (me < power.extra) steps.push_back(power.take_over(me, count));
  for (int mask = 1; mask < power.ranks; mask *= 2)
    steps.push_back({{{me ^ mask, 0, count}}, {{me ^ mask, 0, count}}, true, 0, count});
  if (power.extra > 0) {
    // All round what the extra ranks get rounded.
    steps.push_back({{}, {}, false, 0, count});
    if (me < power.extra) steps.back().sends = {{me + power.ranks, 0, count}};
  }
  return steps;
}

}  // namespace keras_hpc
