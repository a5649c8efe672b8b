// SPDX-License-Identifier: Apache-2.0
// How much each rank counts in a reduction. Pure arithmetic.
#pragma once
#include <vector>

#include "common/dtype.hpp"

namespace keras_hpc {

struct Weights {
  bool weighted = false;        // the factors count, and not all are equal
  double scale = 1;             // of the sum
  std::vector<double> factors;  // of the local ranks
};

// `of_rank`: samples of every rank, of which `local_ranks` are on this node. Not `weighted`: all ranks count alike.
Weights find_weights(Op op, bool weighted, const std::vector<double>& of_rank, const std::vector<int>& local_ranks);

}  // namespace keras_hpc
