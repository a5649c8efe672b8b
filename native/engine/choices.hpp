// SPDX-License-Identifier: Apache-2.0
// Which way an allreduce takes, by place and size of the data: measured (selection.cpp), known from an earlier job, or
// given by the user. The same on all ranks.
#pragma once
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/allreduce.hpp"

namespace keras_hpc {

// An array of the process; one in memory that the ranks of the node share; a slice on its way between nodes; a plan
// whose tensors are on GPUs.
enum class Place { own, segment, network, device };
// The ways for the first two, see allreduce_call.hpp; for the third they are algorithms; the last has staged,
// peer, nccl, hierarchical and mpi.
enum class Path { slot, push, staged, library, peer, nccl, hierarchical, mpi, unknown };
const char* name_of(Path path);
Path parse_path(const std::string& name);  // of an allreduce

class Choices {
 public:
  struct Choice {
    Place place;
    size_t from, to;  // bytes, [from, to)
    int way;          // a Path or an Algorithm
  };
  struct Named {
    std::string place;
    size_t from, to;
    std::string way;
  };

  void add(const Choice& choice);  // wins over those added before
  void add(const Named& choice);   // throws Error on names that are none
  std::optional<Path> path(Place place, size_t nbytes) const;
  std::optional<Algorithm> algorithm(size_t nbytes) const;
  std::vector<Named> all() const;  // the winner first

 private:
  std::optional<int> find(Place place, size_t nbytes) const;

  mutable std::mutex mutex_;
  std::vector<Choice> choices_;
};

}  // namespace keras_hpc
