// SPDX-License-Identifier: Apache-2.0
#include "algorithms/schedule.hpp"

namespace keras_hpc {

Schedule recursive_doubling(int p, int me, size_t count) {
  int power = 1;
  while (2 * power <= p) power *= 2;
  const int extra = p - power;
  // Where p is no power of two, each of the last `extra` ranks hands its data to a partner and gets the result back.
  if (me >= power) return {{{{me - power, 0, count}}, {}}, {{}, {{me - power, 0, count}}}};
  Schedule steps;
  if (me < extra) steps.push_back({{}, {{me + power, 0, count}}, true});
  for (int mask = 1; mask < power; mask *= 2)
    steps.push_back({{{me ^ mask, 0, count}}, {{me ^ mask, 0, count}}, true, 0, count});
  if (extra > 0) {
    // All round what the extra ranks get rounded.
    steps.push_back({{}, {}, false, 0, count});
    if (me < extra) steps.back().sends = {{me + power, 0, count}};
  }
  return steps;
}

}  // namespace keras_hpc
