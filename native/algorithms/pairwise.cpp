// SPDX-License-Identifier: Apache-2.0
#include "algorithms/schedule.hpp"

namespace keras_hpc {

Schedule pairwise(int p, int me, size_t count) {
  Step scatter;
  Step gather;
  scatter.adds = true;
  gather.round_begin = part_of(me, p, count);
  gather.round_end = part_of(me + 1, p, count);
  for (int i = 1; i < p; ++i) {
    const int peer = (me + i) % p;  // not all to the same one first
    add_move(scatter.sends, peer, part_of(peer, p, count), part_of(peer + 1, p, count));
    add_move(gather.sends, peer, gather.round_begin, gather.round_end);
    add_move(gather.receives, peer, part_of(peer, p, count), part_of(peer + 1, p, count));
  }
  for (int peer = 0; peer < p; ++peer)
    if (peer != me) add_move(scatter.receives, peer, gather.round_begin, gather.round_end);
  return {scatter, gather};
}

}  // namespace keras_hpc
