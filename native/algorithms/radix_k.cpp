// SPDX-License-Identifier: Apache-2.0
#include <iterator>
#include <utility>

#include "algorithms/schedule.hpp"

namespace keras_hpc {
namespace {

int largest_divisor(int p, int most) {
  int found = 1;
  for (int divisor = 2; divisor <= most && divisor <= p; ++divisor)
    if (p % divisor == 0) found = divisor;
  return found;
}

}  // namespace

std::vector<int> radices(int p) {
  // Ranks with numbers next to each other are the nearest: four have the fast links of a router, or a part of those of
  // a switch, to themselves. Chosen with the simulator (docs/simulation.md).
  constexpr int kNear = 4, kMost = 32;
  std::vector<int> found;
  if (const int near = largest_divisor(p, kNear); near > 1 && near < p) {
    found.push_back(near);
    p /= near;
  }
  while (p > kMost) {
    const int divisor = largest_divisor(p, kMost);
    if (divisor == 1) break;
    found.push_back(divisor);
    p /= divisor;
  }
  if (p > 1) found.push_back(p);
  return found;
}

Schedule radix_k(int p, int me, size_t count) {
  Schedule steps, back;
  size_t begin = 0, end = count;  // of which this rank holds a sum, of more ranks with each step
  int stride = 1;
  for (const int radix : radices(p)) {
    const int mine = me / stride % radix;
    const auto peer = [&](int digit) { return me + (digit - mine) * stride; };
    const auto bound = [&](int digit) { return begin + part_of(digit, radix, end - begin); };
    Step scatter, gather;
    scatter.adds = true;
    for (int i = 1; i < radix; ++i) {
      const int digit = (mine + i) % radix;  // not all to the same one first
      add_move(scatter.sends, peer(digit), bound(digit), bound(digit + 1));
      add_move(gather.sends, peer(digit), bound(mine), bound(mine + 1));
      add_move(gather.receives, peer(digit), bound(digit), bound(digit + 1));
    }
    for (int digit = 0; digit < radix; ++digit)
      if (digit != mine) add_move(scatter.receives, peer(digit), bound(mine), bound(mine + 1));
    const size_t part_end = bound(mine + 1);
    begin = bound(mine);
    end = part_end;
    stride *= radix;
    steps.push_back(std::move(scatter));
    back.push_back(std::move(gather));
  }
  if (back.empty()) return steps;
  back.back().round_begin = begin;
  back.back().round_end = end;
  steps.insert(steps.end(), std::make_move_iterator(back.rbegin()), std::make_move_iterator(back.rend()));
  return steps;
}

}  // namespace keras_hpc
