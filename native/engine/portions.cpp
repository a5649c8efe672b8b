// SPDX-License-Identifier: Apache-2.0
#include "engine/portions.hpp"

#include <algorithm>

#include "common/error.hpp"
#include "common/index.hpp"

namespace keras_hpc {
namespace {

int local_rank_of(int rank, const Topology& topology) {
  if (rank < 0) return Portion::kEverybody;
  const auto& local = topology.local_ranks();
  const auto found = std::find(local.begin(), local.end(), rank);
  return found == local.end() ? Portion::kElsewhere : static_cast<int>(found - local.begin());
}

int node_of(int rank, const Topology& topology) {
  for (int node = 0; node < topology.node_count; ++node) {
    const auto& ranks = topology.ranks_of_node[at(node)];
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) return node;
  }
  return Portion::kEverybody;
}

}  // namespace

void check_shares(const std::vector<Shares>& shares, const std::vector<TensorSpec>& tensors, const Topology& topology,
                  const std::string& plan) {
  if (shares.empty()) return;
  constexpr size_t line = 64;
  bool fits = shares.size() == tensors.size();
  for (size_t t = 0; fits && t < tensors.size(); ++t) {
    int64_t begin = 0;
    for (const Share& share : shares[t]) {
      const bool last = &share == &shares[t].back();
      fits = fits && share.rank >= 0 && share.rank < topology.size && share.end >= begin &&
             (last ? share.end == tensors[t].count
                   : static_cast<size_t>(share.end) * size_of(tensors[t].dtype) % line == 0);
      begin = share.end;
    }
  }
  if (!fits)
    throw Error("Expected for each tensor of '" + plan +
                "' the ranks of the team that its elements are of, from the first to the last, cut at multiples of 64 "
                "bytes.");
}

std::vector<Shares> shares_of(const std::vector<int>& givers, const std::vector<TensorSpec>& tensors) {
  std::vector<Shares> shares;
  for (size_t t = 0; t < givers.size(); ++t) shares.push_back({{tensors[t].count, givers[t]}});
  return shares;
}

std::vector<std::vector<Run>> runs_of(const std::vector<Shares>& shares, const std::vector<TensorSpec>& tensors,
                                      const Topology& topology) {
  std::vector<std::vector<Run>> runs;
  if (topology.node_count > 1 || topology.size == 1) return runs;
  for (size_t t = 0; t < shares.size(); ++t) {
    auto& of_tensor = runs.emplace_back();
    for (const Share& share : shares[t])
      of_tensor.push_back({static_cast<size_t>(share.end) * size_of(tensors[t].dtype), share.rank});
  }
  return runs;
}

std::vector<Portion> portions_of(const std::vector<Shares>& shares, const std::vector<TensorSpec>& tensors,
                                 const Layout& layout, const Topology& topology) {
  std::vector<Portion> portions;
  for (size_t t = 0; t < shares.size(); ++t) {
    const Range& range = layout.range(static_cast<int>(t));
    const auto add = [&](size_t end, int rank) {
      const size_t begin = portions.empty() ? 0 : portions.back().end;
      if (!portions.empty() && portions.back().rank == rank)
        portions.back().end = end;
      else if (end > begin)
        portions.push_back({begin, end, rank, local_rank_of(rank, topology), node_of(rank, topology)});
    };
    if (shares[t].empty()) add(range.end, Portion::kEverybody);
    for (const Share& share : shares[t])
      add(range.begin + static_cast<size_t>(share.end) * size_of(tensors[t].dtype), share.rank);
  }
  return portions;
}

}  // namespace keras_hpc
