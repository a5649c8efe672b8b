// SPDX-License-Identifier: Apache-2.0
// How much each rank counts in a reduction. Pure arithmetic.
#pragma once
#include <vector>

namespace keras_hpc {

struct Weights {
  bool weighted = false;        // the factors count, because not all are equal
  double scale = 1;             // of the sum
  std::vector<double> factors;  // of the local ranks
};

// `of_rank`: what each rank of this node weighs, of `total`. A rank that weighs nothing has a factor of 0.
void find_weights(const std::vector<double>& of_rank, double total, Weights& found);

}  // namespace keras_hpc
