// SPDX-License-Identifier: Apache-2.0
#include "engine/weights.hpp"

#include <algorithm>
#include <numeric>

#include "common/index.hpp"

namespace keras_hpc {

Weights find_weights(Op op, bool weighted, const std::vector<double>& of_rank, const std::vector<int>& local_ranks) {
  Weights found;
  found.scale = op == Op::mean ? 1.0 / static_cast<double>(of_rank.size()) : 1.0;
  if (!weighted) return found;
  const double total = std::accumulate(of_rank.begin(), of_rank.end(), 0.0);
  const bool equal = std::all_of(of_rank.begin(), of_rank.end(), [&](double weight) { return weight == of_rank[0]; });
  if (equal && total > 0) return found;  // a plain mean, to the last bit
  found.weighted = true;
  found.scale = 1.0;
  for (const int rank : local_ranks) found.factors.push_back(total > 0 ? of_rank[at(rank)] / total : 0.0);
  return found;
}

}  // namespace keras_hpc
