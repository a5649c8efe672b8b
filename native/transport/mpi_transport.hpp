// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <memory>
#include <vector>

#include "mpi/library.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

// Ranks as processes, started by an MPI launcher. `node_of_rank` has one entry per rank of the communicator.
std::unique_ptr<Transport> make_mpi_transport(std::unique_ptr<mpi::Communicator> communicator,
                                              const std::vector<int>& node_of_rank);

}  // namespace keras_hpc
