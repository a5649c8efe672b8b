// SPDX-License-Identifier: Apache-2.0
// Arrays that the ranks of a node can reach directly: the same array on every rank, side by side in one segment.
#pragma once
#include <cstddef>
#include <memory>

#include "transport/segment.hpp"

namespace keras_hpc {

struct Area {
  Area(int id, std::unique_ptr<Segment> segment, size_t nbytes, size_t stride)
      : id(id), nbytes(nbytes), stride(stride), segment(std::move(segment)) {}

  std::byte* of(int local_rank) const { return segment->data() + static_cast<size_t>(local_rank) * stride; }

  // Bytes from one rank's array to the next. Not a multiple of the page: processors compare only the last 12 bits of
  // addresses when a load may depend on an earlier store, and arrays at equal offsets would look like one.
  static size_t stride_for(size_t nbytes) {
    constexpr size_t page = 4096, line = 64;
    return (nbytes + page - 1) / page * page + 17 * line;
  }

  const int id;  // the same on all ranks
  const size_t nbytes;
  const size_t stride;
  const std::unique_ptr<Segment> segment;
};

}  // namespace keras_hpc
