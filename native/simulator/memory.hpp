// SPDX-License-Identifier: Apache-2.0
// Addresses of gradients, of which nothing but the size matters.
#pragma once
#include <sys/mman.h>

#include "common/error.hpp"

namespace keras_hpc::simulated {

// Without memory, until something is written there.
inline void* reserve(size_t nbytes) {
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw Error("Cannot reserve addresses for simulated memory.");
  return data;
}

}  // namespace keras_hpc::simulated
