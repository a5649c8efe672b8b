// SPDX-License-Identifier: Apache-2.0
// Arithmetic on buffers: the only place that knows what the bytes mean.
#pragma once
#include <cstddef>

#include "common/dtype.hpp"

namespace keras_hpc {

// One rank's contribution. The factor is used where `weighted` is set in reduce().
struct Source {
  const void* data;
  double factor;
};

// out[i] = (sources[0][i] op sources[1][i] op ...) * scale, in the order of the sources, for `count` elements and each
// `out` of `outs`; with `weighted`, each source is multiplied by its factor first. 16-bit types are summed and
// multiplied in float32, and min and max propagate NaN. Mean is a sum here: its scale and factors make it one. An `out`
// may be a source. No sources: zeros.
void reduce(DType dtype, Op op, const Source* sources, size_t n_sources, bool weighted, double scale, void* const* outs,
            size_t n_outs, size_t count);

// out[i] = the sum of sources[s][i] * factor, in the order of a tree: sources [first, end) are the sum of those before
// and behind the largest power of two that is less than their number. So neighbours that are a branch may be added up
// before, wherever that is. A factor of 0 makes a source zeros, whatever it holds. float32 and float64.
void sum_in_tree(DType dtype, const Source* sources, size_t n_sources, void* const* outs, size_t n_outs, size_t count);

// Fills memory with what a sum can take without a change of any bit: -0.0, since -0.0 + 0.0 is 0.0; of integers 0.
void fill_neutral(DType dtype, void* to, size_t nbytes);

// float32 to float16 or bfloat16, to the nearest, ties to even; and back.
void to_16_bits(DType dtype, const float* from, void* to, size_t count);
void from_16_bits(DType dtype, const void* from, float* to, size_t count);

// A copy to or from memory that another core has just read or written. There the processor's own block copy, which
// memcpy uses up to some 100 KB, takes twice as long as loads and stores (measured on AMD Zen 4).
void copy_shared(void* to, const void* from, size_t nbytes);

// A copy from there to memory that is in no cache any more, where it can be written without being read first.
void copy_streaming(void* to, const void* from, size_t nbytes);

}  // namespace keras_hpc
