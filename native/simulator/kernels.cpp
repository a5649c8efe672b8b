// SPDX-License-Identifier: Apache-2.0
// What algorithms/kernels.cpp is elsewhere: touches no gradients, and takes the time that it would.
#include "algorithms/kernels.hpp"

#include <algorithm>

#include "simulator/simulated.hpp"

namespace keras_hpc {
namespace {

using simulated::rates;

void take(size_t nbytes, double bytes_per_s) {
  simulated::work(static_cast<double>(nbytes) / bytes_per_s);
}

// Weights of ranks, for once with their values: what a plan does depends on their sum.
void add(const Source* sources, size_t n_sources, void* const* outs, size_t n_outs, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    double sum = 0;
    for (size_t s = 0; s < n_sources; ++s) sum += static_cast<const double*>(sources[s].data)[i];
    for (size_t o = 0; o < n_outs; ++o) static_cast<double*>(outs[o])[i] = sum;
  }
}

}  // namespace

void reduce(DType dtype, Op, const Source* sources, size_t n_sources, bool, double, void* const* outs, size_t n_outs,
            size_t count) {
  if (dtype == DType::float64) add(sources, n_sources, outs, n_outs, count);
  // One source, a scaled copy, is one pass, too.
  take(size_of(dtype) * count * std::max<size_t>(1, n_sources - std::min<size_t>(1, n_sources)),
       rates.reduce_bytes_per_s);
}

void sum_in_tree(DType dtype, const Source* sources, size_t n_sources, void* const* outs, size_t n_outs, size_t count) {
  reduce(dtype, Op::sum, sources, n_sources, false, 1.0, outs, n_outs, count);
}

void fill_neutral(DType, void*, size_t nbytes) {
  take(nbytes, rates.copy_bytes_per_s);
}

void to_16_bits(DType, const float*, void*, size_t count) {
  take(sizeof(float) * count, rates.convert_bytes_per_s);
}

void from_16_bits(DType, const void*, float*, size_t count) {
  take(sizeof(float) * count, rates.convert_bytes_per_s);
}

void copy_shared(void*, const void*, size_t nbytes) {
  take(nbytes, rates.copy_bytes_per_s);
}

void copy_streaming(void*, const void*, size_t nbytes) {
  take(nbytes, rates.copy_bytes_per_s);
}

}  // namespace keras_hpc
