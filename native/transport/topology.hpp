// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

namespace keras_hpc {

// Which rank lives on which node, seen from one rank. "Local" means on the same node.
struct Topology {
  int rank = 0;
  int size = 1;
  int node = 0;
  int node_count = 1;
  int local_rank = 0;
  // The ranks of every node, ascending. Ranks of a node need not be contiguous, nodes need not be equally full.
  std::vector<std::vector<int>> ranks_of_node;
  // Slices of a bucket, one owner each: the local ranks 0..owners-1 of every node. It is the smallest number of ranks
  // on any node, so that slice j has an owner everywhere and slices line up between nodes.
  int owners = 1;
  int largest_node = 1;  // the largest number of ranks on any node

  static Topology make(int rank, const std::vector<int>& node_of_rank);

  const std::vector<int>& local_ranks() const { return ranks_of_node[static_cast<size_t>(node)]; }
  bool is_local(int rank) const { return std::binary_search(local_ranks().begin(), local_ranks().end(), rank); }
  int local_size() const { return static_cast<int>(local_ranks().size()); }
  // Whether each node has one branch of the tree over all ranks that algorithms/kernels.hpp describes, in their order.
  bool nodes_are_branches() const;
  // The owners of slice `slice` on all nodes, in node order.
  std::vector<int> peers_of_slice(int slice) const;
};

}  // namespace keras_hpc
