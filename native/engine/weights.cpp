// SPDX-License-Identifier: Apache-2.0
#include "engine/weights.hpp"

#include <algorithm>

namespace keras_hpc {

void find_weights(const std::vector<double>& of_rank, double total, Weights& found) {
  const double first = of_rank[0];
  found.weighted =
      first == 0 || std::any_of(of_rank.begin(), of_rank.end(), [first](double weight) { return weight != first; });
  found.scale = found.weighted ? 1.0 : first / total;
  found.factors.clear();
  for (const double weight : of_rank) found.factors.push_back(total > 0 ? weight / total : 0.0);
}

}  // namespace keras_hpc
