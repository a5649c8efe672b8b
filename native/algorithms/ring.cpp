// SPDX-License-Identifier: Apache-2.0
#include "algorithms/schedule.hpp"

namespace keras_hpc {

// In step s of the first p - 1, rank r sends chunk r - s to its right neighbour and adds what comes from the left to
// chunk r - s - 1. Then chunk r + 1 is complete at rank r, and in the next p - 1 steps the complete chunks go once
// around: the same formula, one turn later.
Schedule ring(int p, int me, size_t count) {
  const auto modulo = [p](int i) { return (i % p + p) % p; };
  Schedule steps;
  for (int s = 0; s < 2 * (p - 1); ++s) {
    const int sent = modulo(me - s);
    const int received = modulo(me - s - 1);
    Step& step = steps.emplace_back();
    add_move(step.sends, modulo(me + 1), part_of(sent, p, count), part_of(sent + 1, p, count));
    add_move(step.receives, modulo(me - 1), part_of(received, p, count), part_of(received + 1, p, count));
    step.adds = s < p - 1;
    if (s == p - 1) {
      step.round_begin = part_of(sent, p, count);
      step.round_end = part_of(sent + 1, p, count);
    }
  }
  return steps;
}

}  // namespace keras_hpc
