// SPDX-License-Identifier: Apache-2.0
// Messages as SimGrid's own activities, in the place of SMPI's point-to-point messages. The same flows through the same
// links at the same times, but a rank can wait until one of them has ended, where MPI only lets it look again and
// again: that is what makes a thousand nodes affordable. tests/test_simulator.py compares the two.
#pragma once
#include <memory>

#include "transport/transport.hpp"

namespace keras_hpc::simulated {

// Up to so many bytes a message sets out before its receiver has asked for it, as in MPI libraries.
constexpr size_t kEagerBytes = 64 << 10;

// `number` is the same on all ranks, and different for each channel. Collectives go through `mpi`.
std::unique_ptr<Channel> make_mailbox_channel(std::unique_ptr<Channel> mpi, int number, int rank, double overhead_s);

// Before any message: the thread, by SimGrid's number, that receives what comes to this rank through a channel. Else it
// is the rank's own.
void serve(int number, int rank, long thread);

}  // namespace keras_hpc::simulated
