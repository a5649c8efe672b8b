// SPDX-License-Identifier: Apache-2.0
// What each rank sends, receives and adds in an allreduce, step by step: one algorithm per file, pure arithmetic.
// allreduce.cpp carries it out.
//
// The order of a sum: recursive doubling and Rabenseifner add in a tree, the same one; pairwise in the order of ranks;
// ring in that order too, but begun at another rank for each chunk; radix_k in that order round by round. With two
// ranks all are the same.
#pragma once
#include <cstddef>
#include <vector>

namespace keras_hpc {

struct Move {
  int peer;           // index among the ranks that take part
  size_t begin, end;  // elements
};

struct Step {
  std::vector<Move> sends;     // the data as they are when the step begins
  std::vector<Move> receives;  // if they are added: range by range, and for each in the order of ranks
  // What is received is added to the data. Otherwise it replaces them.
  bool adds = false;
  // With values that are rounded while they travel: those that this rank must round before the step, because others
  // take them for the same. Whatever a step that does not add sends has been rounded so, or received.
  size_t round_begin = 0, round_end = 0;
};

using Schedule = std::vector<Step>;

// ceil(log2 p) steps of the whole buffer (2 more where p is no power of two): best for small buffers.
// R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH (2005).
Schedule recursive_doubling(int p, int me, size_t count);

// Halves of halves are added on the way out, and put together again on the way back: 2 log2 p steps, 2 (p - 1) / p of
// the buffer sent (one buffer more for some where p is no power of two). For many ranks. Same source.
Schedule rabenseifner(int p, int me, size_t count);

// 2 (p - 1) steps of 1/p of the buffer each, from neighbour to neighbour: best for large buffers.
// P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations (2009).
Schedule ring(int p, int me, size_t count);

// Two steps: every rank sends to each other rank the part that this one adds up, and then to all its sum. As many bytes
// as the ring, without its latency, but p - 1 messages at once.
Schedule pairwise(int p, int me, size_t count);

// Pairwise in rounds, among the ranks that differ in one digit of their numbers: first among neighbours, who then hold
// sums of a quarter each, then among ranks further away. As many bytes as the ring, most of them between neighbours; a
// few dozen messages at once. Rabenseifner's has all digits of two, pairwise a single one of p.
// T. Peterka et al.: A configurable algorithm for parallel image-compositing applications (2009), there called radix-k.
Schedule radix_k(int p, int me, size_t count);
// Its digits, those of the nearest ranks first; a single one: it is pairwise.
std::vector<int> radices(int p);

// Adds a transfer, unless it is empty.
inline void add_move(std::vector<Move>& moves, int peer, size_t begin, size_t end) {
  if (begin < end) moves.push_back({peer, begin, end});
}

// Trees are of a power of two of ranks. Each of the `extra` ranks beyond it hands its data to a partner and gets the
// result back.
struct Power {
  explicit Power(int p) {
    while (2 * ranks <= p) ranks *= 2;
    extra = p - ranks;
  }
  Schedule beyond(int me, size_t count) const {
    return {{{{me - ranks, 0, count}}, {}, false, 0, count}, {{}, {{me - ranks, 0, count}}}};
  }
  Step take_over(int me, size_t count) const { return {{}, {{me + ranks, 0, count}}, true}; }

  int ranks = 1;
  int extra = 0;
};

// First element of the part of rank `i`.
inline size_t part_of(int i, int p, size_t count) {
  return count * static_cast<size_t>(i) / static_cast<size_t>(p);
}

}  // namespace keras_hpc
