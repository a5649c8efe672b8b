// SPDX-License-Identifier: Apache-2.0
// The sum of what several ranks have on GPUs, computed by one of them: as keras_hpc::reduce in algorithms/kernels.hpp,
// with the same bits, but for those of a NaN.
//
// The kernel is text, which NVRTC compiles for the GPU at hand: nothing of CUDA is needed to build.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "common/dtype.hpp"
#include "device/device.hpp"
#include "engine/weights.hpp"

namespace keras_hpc::device {

constexpr int kMostRanks = 32;

// What the kernel is told, in its own words below.
struct Sum {
  Pointer sources[kMostRanks], outs[kMostRanks];
  double factors[kMostRanks];
  double scale;
  unsigned long long lines;  // of 16 bytes, of each source and each out
  int n_sources, n_outs, weighted;
};

// Of what ranks have, each in its `sources`, in the order of the ranks; without outs.
Sum sum_of(const std::vector<Pointer>& sources, const Weights& weights, size_t nbytes);

constexpr const char* kSumKernel = R"(
struct Sum {
  const char* sources[32];
  char* outs[32];
  double factors[32];
  double scale;
  unsigned long long lines;
  int n_sources, n_outs, weighted;
};
struct Float16 { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
template <class T>
union Line {
  uint4 whole;
  T values[16 / sizeof(T)];
};

__device__ float widen(Float16 value) {
  const unsigned sign = (value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return __uint_as_float(0x7f800000u | (magnitude << 13) | sign);
  if (magnitude >= 0x400u) return __uint_as_float(((magnitude << 13) + (112u << 23)) | sign);
  return __uint_as_float(__float_as_uint(static_cast<float>(magnitude) * 5.9604644775390625e-8f) | sign);  // 2^-24
}
__device__ float widen(BFloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ float widen(float value) { return value; }
__device__ double widen(double value) { return value; }

// To the nearest, ties to even.
__device__ void narrow(float value, Float16& to) {
  const unsigned bits = __float_as_uint(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const unsigned rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  unsigned found = rounded >= 0x47800000u ? 0x7c00u : (rounded - 0x38000000u) >> 13;
  // Adding 0.5 rounds a subnormal at the right bit.
  if (magnitude < 0x38800000u) found = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
  if (magnitude > 0x7f800000u) found = 0x7e00u;
  to.bits = static_cast<unsigned short>(found | sign);
}
__device__ void narrow(float value, BFloat16& to) {
  const unsigned bits = __float_as_uint(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}
__device__ void narrow(float value, float& to) { to = value; }
__device__ void narrow(double value, double& to) { to = value; }

template <class T, class Wide>
__device__ void add_up(const Sum& sum) {
  constexpr int each = 16 / sizeof(T);
  const unsigned long long threads = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < sum.lines; i += threads) {
    Wide sums[each] = {};
    Line<T> line;
    for (int s = 0; s < sum.n_sources; ++s) {
      const Wide factor = static_cast<Wide>(sum.factors[s]);
      line.whole = reinterpret_cast<const uint4*>(sum.sources[s])[i];
#pragma unroll
      for (int k = 0; k < each; ++k) {
        const Wide value = sum.weighted ? widen(line.values[k]) * factor : widen(line.values[k]);
        sums[k] = s == 0 ? value : sums[k] + value;
      }
    }
    const Wide scale = static_cast<Wide>(sum.scale);
#pragma unroll
    for (int k = 0; k < each; ++k) narrow(sums[k] * scale, line.values[k]);
    for (int o = 0; o < sum.n_outs; ++o) reinterpret_cast<uint4*>(sum.outs[o])[i] = line.whole;
  }
}

extern "C" __global__ void sum_float16(Sum sum) { add_up<Float16, float>(sum); }
extern "C" __global__ void sum_bfloat16(Sum sum) { add_up<BFloat16, float>(sum); }
extern "C" __global__ void sum_float32(Sum sum) { add_up<float, float>(sum); }
extern "C" __global__ void sum_float64(Sum sum) { add_up<double, double>(sum); }
)";

// Compiled for a device, as long as it lives.
class SumKernel {
 public:
  // NVRTC compiles it once for all devices of a kind. Throws Error where that is missing, or cannot, or where the
  // device does not run it.
  explicit SumKernel(const Device& device);
  ~SumKernel();
  SumKernel(const SumKernel&) = delete;
  SumKernel& operator=(const SumKernel&) = delete;

  // With the device's context. The sources and outs are aligned to 16 bytes; an out may be a source.
  void launch(DType dtype, const Sum& sum, StreamHandle stream) const;

 private:
  void find_functions();
  void try_to_launch() const;

  const Device& device_;
  const unsigned most_blocks_;
  ModuleHandle module_ = nullptr;
  std::map<DType, FunctionHandle> functions_;
};

}  // namespace keras_hpc::device
