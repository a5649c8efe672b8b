// SPDX-License-Identifier: Apache-2.0
// Simulated time, of the rank that calls: the simulator's side of common/waiting.hpp and algorithms/kernels.hpp.
#pragma once
#include <simgrid/forward.h>

#include <cstddef>

namespace keras_hpc::simulated {

// Of one core. None is measured on the machines that are simulated: see docs/simulation.md.
struct Rates {
  double reduce_bytes_per_s = 5e9;
  double copy_bytes_per_s = 8e9;
  double convert_bytes_per_s = 4e9;
};
extern Rates rates;

double now();  // seconds
void sleep(double seconds);
// Time of the processor. Pieces of less than a microsecond are put together.
void work(double seconds);
// A rank that waits does so at most until then, because it has something else to do.
void wake_at(double time);
// The rank has looked whether it has ended, and it has not. Until it waits, and so looks again, it need not look before
// one of those has.
void watch(simgrid::s4u::CommPtr comm);

// SimGrid's number for a rank.
inline long pid_of(int rank) {
  return rank + 1;
}

}  // namespace keras_hpc::simulated
