// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "device/api.hpp"
#include "engine/team.hpp"

namespace keras_hpc {

// Collective; blocks. Team::allreduce of a tensor on a GPU, after what the stream has been given, through memory of the
// host that is pinned for the call. Throws Error.
void allreduce_on(Team& team, int ordinal, device::Pointer data, DType dtype, Op op, const std::string& what,
                  const std::vector<int64_t>& shape, device::StreamHandle stream);

}  // namespace keras_hpc
