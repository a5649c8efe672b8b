// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process: every algorithm, any number of ranks and any shape of nodes, testable in seconds.
#pragma once
#include <memory>
#include <vector>

#include "transport/transport.hpp"

namespace keras_hpc {

// Copies so many bytes, also of memory that the host cannot reach.
using CopyFunction = void (*)(void* to, const void* from, size_t nbytes);

// One transport per rank; transport r is used by the thread that plays rank r. `copy`: by which messages are copied
// that may be in memory of GPUs; null: none are.
std::vector<std::unique_ptr<Transport>> make_in_process_transports(const std::vector<int>& node_of_rank,
                                                                   CopyFunction copy = nullptr);

}  // namespace keras_hpc
