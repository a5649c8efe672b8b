// SPDX-License-Identifier: Apache-2.0
#include "transport/topology.hpp"

#include <algorithm>
#include <map>

#include "common/error.hpp"

namespace keras_hpc {

Topology Topology::make(int rank, const std::vector<int>& node_of_rank) {
  if (rank < 0 || rank >= static_cast<int>(node_of_rank.size())) throw Error("Topology: rank out of range");
  Topology t;
  t.rank = rank;
  t.size = static_cast<int>(node_of_rank.size());
  std::map<int, int> number;  // a node's name to its number: nodes count in order of their first rank
  for (int r = 0; r < t.size; ++r) {
    const int node =
        number.emplace(node_of_rank[static_cast<size_t>(r)], static_cast<int>(number.size())).first->second;
    if (node == static_cast<int>(t.ranks_of_node.size())) t.ranks_of_node.emplace_back();
    auto& ranks = t.ranks_of_node[static_cast<size_t>(node)];
    if (r == rank) {
      t.node = node;
      t.local_rank = static_cast<int>(ranks.size());
    }
    ranks.push_back(r);
  }
  t.node_count = static_cast<int>(t.ranks_of_node.size());
  t.owners = t.size;
  for (const auto& ranks : t.ranks_of_node) {
    t.owners = std::min(t.owners, static_cast<int>(ranks.size()));
    t.largest_node = std::max(t.largest_node, static_cast<int>(ranks.size()));
  }
  return t;
}

bool Topology::nodes_are_branches() const {
  const auto width = static_cast<int>(ranks_of_node[0].size());
  for (int n = 0, first = 0; n < node_count; ++n) {
    const std::vector<int>& ranks = ranks_of_node[static_cast<size_t>(n)];
    const auto length = static_cast<int>(ranks.size());
    if (ranks.front() != first || ranks.back() != first + length - 1) return false;  // they ascend
    if (n + 1 < node_count && (length != width || (width & (width - 1)) != 0)) return false;
    if (length > width) return false;
    first += length;
  }
  return true;
}

std::vector<int> Topology::peers_of_slice(int slice) const {
  std::vector<int> peers;
  for (const auto& ranks : ranks_of_node) peers.push_back(ranks[static_cast<size_t>(slice)]);
  return peers;
}

}  // namespace keras_hpc
