// SPDX-License-Identifier: Apache-2.0
// Training steps: computing is a timeline of when each gradient is there.
#pragma once
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/layout.hpp"
#include "simulator/options.hpp"
#include "simulator/simulated.hpp"

namespace keras_hpc {

inline double slowest(double seconds) {
  double most = 0;
  MPI_Allreduce(&seconds, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return most;
}

struct Timeline {
  std::vector<TensorSpec> tensors;
  std::vector<double> ready;  // as a share of computing
  std::vector<int> order;     // in which they become ready

  explicit Timeline(const std::string& path) {
    std::ifstream file(path);
    int64_t count;
    for (double at; file >> count >> at;) {
      tensors.push_back({std::to_string(tensors.size()), DType::float32, count});
      ready.push_back(at);
    }
    if (tensors.empty() || !file.eof())
      throw Error("Expected a file of tensors: the elements of each and its time. Received: " + path);
    order.resize(tensors.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [this](int a, int b) { return ready[at(a)] < ready[at(b)]; });
  }

  // Of a tensor. Nobody reads or writes gradients, so all of them may stand in the same place.
  size_t largest_bytes() const {
    int64_t most = 0;
    for (const TensorSpec& tensor : tensors) most = std::max(most, tensor.count);
    return static_cast<size_t>(most) * sizeof(float);
  }
};

// How long each step of one node takes, as a share of the mean: measured ones, drawn at random.
class Variation {
 public:
  Variation(const std::string& path, int rank) : random_(static_cast<uint64_t>(rank)) {
    if (path.empty()) return;
    std::ifstream file(path);
    for (double seconds; file >> seconds;) steps_.push_back(seconds);
    if (steps_.size() < 2 || !file.eof()) throw Error("Expected a file of seconds, two or more. Received: " + path);
    const double mean = std::accumulate(steps_.begin(), steps_.end(), 0.0) / static_cast<double>(steps_.size());
    for (double& step : steps_) step /= mean;
  }
  double next() { return steps_.empty() ? 1.0 : steps_[random_() % steps_.size()]; }

 private:
  std::mt19937_64 random_;  // the same in every run
  std::vector<double> steps_;
};

// Steps in which `reduce` averages gradients while a node computes for so many seconds from `begin`.
template <class Reduce>
void time_steps(const Options& options, int me, int size, size_t buckets, Reduce&& reduce) {
  Variation variation(options.variation, me);
  MPI_Barrier(MPI_COMM_WORLD);
  const double first = simulated::now();
  double exposed = 0;
  for (int step = 0; step < options.repeats; ++step) {
    const double begin = simulated::now(), compute_s = options.compute_s * variation.next();
    reduce(begin, compute_s);
    const double left = begin + compute_s - simulated::now();
    if (left > 0) simulated::sleep(left);
    exposed += std::max(0.0, -left);
    simulated::sleep(options.update_s);
  }
  const double step_s = slowest(simulated::now() - first) / options.repeats;
  const double exposed_s = slowest(exposed) / options.repeats;
  if (me == 0)
    std::printf(
        "{\"nodes\": %d, \"algorithm\": \"%s\", \"buckets\": %zu, \"step_ms\": %.6f, \"exposed_ms\": %.6f, "
        "\"efficiency\": %.6f}\n",
        size, options.algorithm.c_str(), buckets, step_s * 1e3, exposed_s * 1e3,
        (options.compute_s + options.update_s) / step_s);
}

}  // namespace keras_hpc
