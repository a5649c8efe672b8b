// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process: every algorithm, any number of ranks and any shape of nodes, testable in seconds.
#pragma once
#include <memory>
#include <vector>

#include "transport/transport.hpp"

namespace keras_hpc {

// One transport per rank; transport r is used by the thread that plays rank r.
std::vector<std::unique_ptr<Transport>> make_in_process_transports(const std::vector<int>& node_of_rank);

}  // namespace keras_hpc
