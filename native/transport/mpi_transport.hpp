// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <memory>
#include <vector>

#include "mpi/library.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

constexpr size_t kLargestMessage = size_t{1} << 30;

// Ranks as processes, started by an MPI launcher. `node_of_rank` has one entry per rank of the communicator. Messages
// of more than `largest_message` bytes go in parts.
std::unique_ptr<Transport> make_mpi_transport(std::unique_ptr<mpi::Communicator> communicator,
                                              const std::vector<int>& node_of_rank,
                                              size_t largest_message = kLargestMessage);

// Collective: the node of each rank, of the ranks on each host. Those that cannot share memory are no node, as in
// containers that have each a name space of processes of its own: they reach each other through MPI.
std::vector<int> nodes_that_share_memory(const mpi::Communicator& communicator, const std::vector<int>& host_of_rank);

}  // namespace keras_hpc
