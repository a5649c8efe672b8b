// SPDX-License-Identifier: Apache-2.0
// How values travel between nodes: as they are, or float32 rounded to 16 bits. Sums are taken in float32 either way.
#pragma once
#include <vector>

#include "algorithms/kernels.hpp"

namespace keras_hpc {

class Wire {
 public:
  Wire(DType data, DType wire) : data_(data), wire_(data == DType::float32 ? wire : data) {}
  bool rounds() const { return wire_ != data_; }
  size_t nbytes(size_t count) const { return count * size_of(wire_); }

  void encode(const void* data, void* sent, size_t count) const;
  void decode(const void* received, void* data, size_t count) const;
  // Makes of the data what others receive of them.
  void round(void* data, size_t count) const;
  // data = sum of `received`, in their order, with the data themselves at place `mine`.
  void combine(Op op, void* data, const std::vector<const void*>& received, size_t mine, size_t count) const;

 private:
  DType data_;
  DType wire_;
};

}  // namespace keras_hpc
