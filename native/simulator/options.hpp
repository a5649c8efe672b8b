// SPDX-License-Identifier: Apache-2.0
// What is to be simulated: `--option value` pairs.
#pragma once
#include <string>

#include "algorithms/allreduce.hpp"
#include "common/error.hpp"
#include "engine/layout.hpp"
#include "simulator/simulated.hpp"

namespace keras_hpc {

struct Options {
  std::string tensors;              // a file: for each, its elements and when it is there, as a share of compute_s
  size_t bytes = 1 << 20;           // of an allreduce, where no tensors are given
  std::string algorithm = "usual";  // the engine's choice; or one by name; or mpi, for an allreduce of the library
  double compute_s = 0.29, update_s = 0.01;
  int repeats = 3;
  std::string wire = "float32";
  std::string messages = "simgrid";  // or mpi: SMPI's, as the engine uses them elsewhere; slower to simulate
  double overhead_s = 4e-7;          // that it takes the processor to send or receive one, if they are SimGrid's
  size_t bucket_bytes = 0;           // the engine's choice
  int lanes = 1;                     // of the team, each with a thread and a core of its own
  std::string variation;             // a file of what a node's steps took, of which each node takes some at random

  Options(int count, char** words) {
    for (int i = 1; i < count; i += 2) {
      const std::string name = words[i];
      if (i + 1 >= count) throw Error("Expected a value after the option. Received: " + name);
      const std::string value = words[i + 1];
      if (name == "--tensors")
        tensors = value;
      else if (name == "--bytes")
        bytes = std::stoull(value);
      else if (name == "--algorithm")
        algorithm = value;
      else if (name == "--compute-s")
        compute_s = std::stod(value);
      else if (name == "--update-s")
        update_s = std::stod(value);
      else if (name == "--repeats")
        repeats = std::stoi(value);
      else if (name == "--wire")
        wire = value;
      else if (name == "--messages")
        messages = value;
      else if (name == "--overhead-s")
        overhead_s = std::stod(value);
      else if (name == "--bucket-bytes")
        bucket_bytes = std::stoull(value);
      else if (name == "--lanes")
        lanes = std::stoi(value);
      else if (name == "--variation")
        variation = value;
      else if (name == "--reduce-rate")
        simulated::rates.reduce_bytes_per_s = std::stod(value);
      else if (name == "--copy-rate")
        simulated::rates.copy_bytes_per_s = std::stod(value);
      else if (name == "--convert-rate")
        simulated::rates.convert_bytes_per_s = std::stod(value);
      else
        throw Error("Unknown option. Received: " + name);
    }
    if (lanes < 1 || (lanes > 1 && messages == "mpi"))
      throw Error("Expected one lane, or several with messages of SimGrid's. Received: " + std::to_string(lanes));
    if (messages != "simgrid" && messages != "mpi")
      throw Error("Unknown kind of messages. Expected simgrid or mpi. Received: " + messages);
  }

  // The library's own allreduce, in the place of the engine's.
  bool of_library() const { return algorithm == "mpi"; }
  Algorithm algorithm_for(size_t nbytes, size_t peers) const {
    return algorithm == "usual" ? usual_algorithm(nbytes, peers) : parse_algorithm(algorithm);
  }
};

}  // namespace keras_hpc
