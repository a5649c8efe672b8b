// SPDX-License-Identifier: Apache-2.0
// What the control groups of this process allow it. A container has one, and so have the jobs of many batch systems.
#pragma once
#include <cstdint>
#include <limits>
#include <string>

namespace keras_hpc {

struct ControlGroup {
  uint64_t memory_limit = UINT64_MAX;  // bytes; the least of the group and those around it
  uint64_t memory_left = UINT64_MAX;   // bytes, without what the kernel can take back
  double cores = std::numeric_limits<double>::infinity();
  uint64_t cores_of = 0;  // stands for the group that the cores are given to together

  // Of both versions of control groups. `root` is put before all paths, for tests.
  static ControlGroup mine(const std::string& root = "");
};

}  // namespace keras_hpc
