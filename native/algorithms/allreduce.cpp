// SPDX-License-Identifier: Apache-2.0
#include "algorithms/allreduce.hpp"

#include "common/error.hpp"

namespace keras_hpc {

const char* name_of(Algorithm algorithm) {
  constexpr const char* names[] = {"recursive_doubling", "rabenseifner", "ring", "pairwise"};
  return names[static_cast<size_t>(algorithm)];
}

Algorithm parse_algorithm(const std::string& name) {
  for (const Algorithm algorithm : kAlgorithms)
    if (name == name_of(algorithm)) return algorithm;
  throw Error(
      "Unknown algorithm of an allreduce. Expected recursive_doubling, rabenseifner, ring or pairwise. Received: " +
      name);
}

Algorithm usual_algorithm(size_t nbytes, size_t peers) {
  // Below it the number of messages decides, above it the number of bytes.
  constexpr size_t small_bytes = 16 << 10;
  constexpr size_t few_peers = 16;
  if (nbytes <= small_bytes) return Algorithm::recursive_doubling;
  return peers <= few_peers ? Algorithm::pairwise : Algorithm::ring;
}

}  // namespace keras_hpc
