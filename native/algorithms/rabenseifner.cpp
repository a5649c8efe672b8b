// SPDX-License-Identifier: Apache-2.0
#include "algorithms/schedule.hpp"

namespace keras_hpc {

Schedule rabenseifner(int p, int me, size_t count) {
  const Power power(p);
  if (me >= power.ranks) return power.beyond(me, count);
  Schedule steps;
  if (me < power.extra) steps.push_back(power.take_over(me, count));

  // Each time two ranks hold sums of the same range, each gives away one half of it.
  struct Half {
    int peer;
    size_t begin, end;              // kept
    size_t other_begin, other_end;  // given away
  };
  std::vector<Half> halves;
  size_t begin = 0;
  size_t end = count;
  for (int mask = 1; mask < power.ranks; mask *= 2) {
    const size_t middle = begin + (end - begin) / 2;
    const bool lower = (me & mask) == 0;
    halves.push_back(
        {me ^ mask, lower ? begin : middle, lower ? middle : end, lower ? middle : begin, lower ? end : middle});
    const Half& half = halves.back();
    begin = half.begin;
    end = half.end;
    Step& step = steps.emplace_back();
    step.adds = true;
    add_move(step.sends, half.peer, half.other_begin, half.other_end);
    add_move(step.receives, half.peer, begin, end);
  }
  for (size_t i = halves.size(); i-- > 0;) {
    const Half& half = halves[i];
    Step& step = steps.emplace_back();
    if (i + 1 == halves.size()) {
      step.round_begin = half.begin;
      step.round_end = half.end;
    }
    add_move(step.sends, half.peer, half.begin, half.end);
    add_move(step.receives, half.peer, half.other_begin, half.other_end);
  }
  if (me < power.extra) steps.push_back({{{me + power.ranks, 0, count}}, {}});
  return steps;
}

}  // namespace keras_hpc
