// SPDX-License-Identifier: Apache-2.0
// Of a plan whose ranks do not all need all: which rank needs, or gives, what. Plain arithmetic, the same on every
// rank.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/layout.hpp"
#include "transport/topology.hpp"

namespace keras_hpc {

// Neighbouring elements of a tensor, from where the share before has ended, that are of one rank.
struct Share {
  int64_t end;
  int rank;
};
using Shares = std::vector<Share>;  // of a tensor; none: all ranks need all of it

// Neighbouring bytes of a plan's buffer that are of the same rank.
struct Portion {
  static constexpr int kEverybody = -1, kElsewhere = -2;

  size_t begin, end;
  int rank;        // of the team, or kEverybody
  int local_rank;  // on this node; kEverybody, or kElsewhere: the rank is on another node
  int node;        // or kEverybody
};

// Raises Error unless there are shares of each tensor, whole, and cut at multiples of 64 bytes.
void check_shares(const std::vector<Shares>& shares, const std::vector<TensorSpec>& tensors, const Topology& topology,
                  const std::string& plan);

// On a single node whoever needs or gives something adds it up, or hands it on, itself. Across nodes nobody owns more
// than slices: none.
std::vector<std::vector<Run>> runs_of(const std::vector<Shares>& shares, const std::vector<TensorSpec>& tensors,
                                      const Topology& topology);

// A tensor of each giver.
std::vector<Shares> shares_of(const std::vector<int>& givers, const std::vector<TensorSpec>& tensors);

// In the order of the buffer, without gaps between the first tensor and the last; none if there are no shares.
std::vector<Portion> portions_of(const std::vector<Shares>& shares, const std::vector<TensorSpec>& tensors,
                                 const Layout& layout, const Topology& topology);

}  // namespace keras_hpc
