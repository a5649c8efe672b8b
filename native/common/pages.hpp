// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <unistd.h>

#include <cstddef>

namespace keras_hpc {

// Bytes of a page of memory: 4 KiB, or 64 KiB with some kernels for ARM.
inline size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

inline size_t whole_pages(size_t nbytes) {
  return (nbytes + page_size() - 1) / page_size() * page_size();
}

}  // namespace keras_hpc
