// SPDX-License-Identifier: Apache-2.0
#include "algorithms/allreduce.hpp"

namespace keras_hpc {

std::unique_ptr<Allreduce> make_allreduce(const AllreduceArgs& args) {
  // Below it the number of messages decides, above it the number of bytes.
  constexpr size_t small_bytes = 64 << 10;
  const bool small = args.count * size_of(args.dtype) <= small_bytes;
  return small || args.peers.size() == 2 ? recursive_doubling(args) : ring(args);
}

}  // namespace keras_hpc
