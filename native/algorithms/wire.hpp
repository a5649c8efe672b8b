// SPDX-License-Identifier: Apache-2.0
// How values travel between nodes: as they are, or float32 rounded to 16 bits. Sums are taken in float32 either way.
#pragma once
#include <vector>

#include "algorithms/kernels.hpp"

namespace keras_hpc {

class Wire {
 public:
  void set(DType data, DType wire);
  bool rounds() const { return wire_ != data_; }
  size_t nbytes(size_t count) const { return count * size_of(wire_); }

  // Where it rounds: to 16 bits, and back.
  void encode(const void* data, void* sent, size_t count) const;
  void decode(const void* received, void* data, size_t count) const;
  // data = sum of `received`, in their order, with the data themselves at place `mine`.
  void combine(Op op, void* data, const std::vector<const void*>& received, size_t mine, size_t count);
  // The same sum in the order of a tree (algorithms/kernels.hpp). Where nothing is rounded.
  void sum_in_tree(void* data, const std::vector<const void*>& received, size_t mine, size_t count);

 private:
  DType data_ = DType::float32;
  DType wire_ = DType::float32;
  std::vector<Source> sources_;
  std::vector<float> decoded_;
};

}  // namespace keras_hpc
