// SPDX-License-Identifier: Apache-2.0
#include <mpi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "common/error.hpp"
#include "simulator/measure.hpp"
#include "simulator/memory.hpp"
#include "simulator/simulated.hpp"
#include "simulator/steps.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kLargestCall = 256 << 20;

// Addresses for so many bytes, with little memory behind them: gradients of a thousand ranks fit into one machine.
float* fold(size_t nbytes) {
  constexpr size_t kFold = 64 << 10;
  const size_t folds = (nbytes + kFold - 1) / kFold;
  auto* data = static_cast<std::byte*>(simulated::reserve(folds * kFold));
  static const int file = memfd_create("gradients", MFD_CLOEXEC);
  bool done = file >= 0 && ftruncate(file, kFold) == 0;
  for (size_t i = 0; done && i < folds; ++i)
    done = mmap(data + i * kFold, kFold, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
  if (!done) throw Error("Cannot fold simulated memory.");
  return reinterpret_cast<float*>(data);
}

// Blocks. Its messages are SMPI's; its sums take what adding up 1/p of the bytes of p ranks does, the least that any
// algorithm needs.
void allreduce_of_library(size_t nbytes, int size) {
  static float* const from = fold(kLargestCall);
  static float* const to = fold(kLargestCall);
  if (nbytes > kLargestCall) throw Error("Too many bytes for one call. Received: " + std::to_string(nbytes));
  MPI_Allreduce(from, to, static_cast<int>(nbytes / sizeof(float)), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  simulated::sleep(static_cast<double>(nbytes) * (size - 1) / size / simulated::rates.reduce_bytes_per_s);
}

void time_calls(const Options& options, int me, int size) {
  double least = 1e9;
  for (int i = 0; i < options.repeats; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = simulated::now();
    allreduce_of_library(options.bytes, size);
    least = std::min(least, slowest(simulated::now() - begin));
  }
  if (me == 0)
    std::printf("{\"nodes\": %d, \"algorithm\": \"mpi\", \"bytes\": %zu, \"us\": %.3f}\n", size, options.bytes,
                least * 1e6);
}

// One call for each bucket, once all of it is there.
void time_steps_of_calls(const Options& options, int me, int size) {
  const Timeline timeline(options.tensors);
  Topology topology;
  topology.node_count = size;
  const Layout layout(timeline.tensors, 1, BucketBytes::of(topology, options.bucket_bytes));
  time_steps(options, me, size, layout.buckets().size(), [&](double begin, double compute_s) {
    for (const Bucket& bucket : layout.buckets()) {
      const auto of_bucket = timeline.ready.begin() + bucket.first;
      const double ready = *std::max_element(of_bucket, of_bucket + (bucket.last - bucket.first + 1));
      const double left = begin + compute_s * ready - simulated::now();
      if (left > 0) simulated::sleep(left);
      allreduce_of_library(bucket.end - bucket.begin, size);
    }
  });
}

}  // namespace

void time_library(const Options& options, int rank, int size) {
  options.tensors.empty() ? time_calls(options, rank, size) : time_steps_of_calls(options, rank, size);
}

}  // namespace keras_hpc
