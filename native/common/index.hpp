// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>

namespace keras_hpc {

// Ranks, tensors and buckets are counted by int; what they index wants size_t.
inline size_t at(int i) {
  return static_cast<size_t>(i);
}

}  // namespace keras_hpc
