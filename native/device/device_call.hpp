// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "device/api.hpp"
#include "engine/team.hpp"

namespace keras_hpc {

// Collective. Team::allreduce of a tensor on a GPU, after what the stream has been given, through pinned memory of the
// host that the team keeps for it. Blocks until the result is on its way back: what the stream is given from then on
// finds it. Throws Error; one of the driver is the team's.
void allreduce_on(const std::shared_ptr<Team>& team, int ordinal, device::Pointer data, DType dtype, Op op,
                  const std::string& what, const std::vector<int64_t>& shape, device::StreamHandle stream);

}  // namespace keras_hpc
