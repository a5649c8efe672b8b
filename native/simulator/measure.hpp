// SPDX-License-Identifier: Apache-2.0
// What the simulator times; rank 0 prints one line of JSON.
#pragma once
#include "simulator/options.hpp"

namespace keras_hpc {

// The engine's allreduce, or steps if there are tensors.
void time_engine(const Options& options, int size);
// That of the MPI library, of the kind that smpirun was told: blocking, in steps one call for each bucket.
void time_library(const Options& options, int rank, int size);

}  // namespace keras_hpc
