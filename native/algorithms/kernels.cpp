// SPDX-License-Identifier: Apache-2.0
#include "algorithms/kernels.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "common/error.hpp"

// One binary, every x86-64: the loader picks the version for the processor at hand. (ThreadSanitizer's own start-up
// breaks the mechanism.)
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__)
#define KHPC_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define KHPC_CLONES
#endif
#define KHPC_INLINE inline __attribute__((always_inline))
// Iterations are independent: an `out` may be a source, never a part of one.
#define KHPC_INDEPENDENT _Pragma("omp simd")

namespace keras_hpc {
namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
KHPC_INLINE To bit_cast(From value) {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &value, sizeof to);
  return to;
}

// Written without branches on the value, so that compilers make vector code of it.
KHPC_INLINE float widen(Float16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  // Exponent and mantissa go into place, and the exponent's bias becomes that of float32.
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  // Subnormals are multiples of 2^-24. No float32 on the way is one: for those, processors take much longer.
  const auto subnormal = bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t special = 0x7f800000u | (magnitude << 13);  // infinity and NaN
  const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
  return bit_cast<float>((magnitude >= 0x7c00u ? special : finite) | sign);
}
KHPC_INLINE float widen(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
KHPC_INLINE float widen(float value) {
  return value;
}
KHPC_INLINE double widen(double value) {
  return value;
}
KHPC_INLINE int32_t widen(int32_t value) {
  return value;
}
KHPC_INLINE int64_t widen(int64_t value) {
  return value;
}

// Round to nearest, ties to even.
KHPC_INLINE void narrow(float value, Float16& to) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal result: round at bit 13, then rebias the exponent. Values beyond the range become infinity.
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  const uint32_t normal = rounded >= 0x47800000u ? 0x7c00u : (rounded - 0x38000000u) >> 13;
  // Subnormal result: adding 0.5 lets the processor round at the right bit.
  const uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? tiny : normal;
  to.bits = static_cast<uint16_t>((magnitude > 0x7f800000u ? 0x7e00u : finite) | sign);
}
KHPC_INLINE void narrow(float value, BFloat16& to) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}
template <class T>
KHPC_INLINE void narrow(T value, T& to) {
  to = value;
}

template <Op op, class W>
KHPC_INLINE W combine(W a, W b) {
  if constexpr (op == Op::min) return (b < a || b != b) ? b : a;
  if constexpr (op == Op::max) return (b > a || b != b) ? b : a;
  if constexpr (std::is_integral_v<W>) {  // sums and products of integers wrap around, as everywhere
    const auto x = static_cast<std::make_unsigned_t<W>>(a), y = static_cast<std::make_unsigned_t<W>>(b);
    return static_cast<W>(op == Op::product ? x * y : x + y);
  } else {
    return op == Op::product ? a * b : a + b;
  }
}

// Two ranks, in one pass over memory.
template <class T, Op op>
KHPC_INLINE void reduce_two(const T* x, const T* y, double scale, T* out, T* copy, size_t count) {
  using W = decltype(widen(T{}));
  const W factor = static_cast<W>(scale);
  if (copy == nullptr) {
    KHPC_INDEPENDENT
    for (size_t i = 0; i < count; ++i) narrow(static_cast<W>(combine<op>(widen(x[i]), widen(y[i])) * factor), out[i]);
  } else {
    KHPC_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      T result;
      narrow(static_cast<W>(combine<op>(widen(x[i]), widen(y[i])) * factor), result);
      out[i] = result;
      copy[i] = result;
    }
  }
}

template <class T, Op op>
KHPC_INLINE void reduce_as(const Source* sources, size_t n, bool weighted, double scale, void* const* outs,
                           size_t n_outs, size_t count) {
  using W = decltype(widen(T{}));
  if (n == 2 && !weighted && n_outs <= 2)
    return reduce_two<T, op>(static_cast<const T*>(sources[0].data), static_cast<const T*>(sources[1].data), scale,
                             static_cast<T*>(outs[0]), n_outs == 2 ? static_cast<T*>(outs[1]) : nullptr, count);
  constexpr size_t block = 1024;  // elements; the sums stay in the first-level cache
  W sums[block];
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t m = std::min(block, count - begin);
    for (size_t s = 0; s < n; ++s) {
      const T* x = static_cast<const T*>(sources[s].data) + begin;
      const W factor = static_cast<W>(sources[s].factor);
      if (weighted && s == 0)
        for (size_t i = 0; i < m; ++i) sums[i] = widen(x[i]) * factor;
      else if (weighted)
        for (size_t i = 0; i < m; ++i) sums[i] = combine<op>(sums[i], static_cast<W>(widen(x[i]) * factor));
      else if (s == 0)
        for (size_t i = 0; i < m; ++i) sums[i] = widen(x[i]);
      else
        for (size_t i = 0; i < m; ++i) sums[i] = combine<op>(sums[i], widen(x[i]));
    }
    if (n == 0) std::fill(sums, sums + m, W{});
    if (scale != 1.0)
      for (size_t i = 0; i < m; ++i) sums[i] = static_cast<W>(sums[i] * static_cast<W>(scale));
    T* to = static_cast<T*>(outs[0]) + begin;
    for (size_t i = 0; i < m; ++i) narrow(sums[i], to[i]);
    for (size_t o = 1; o < n_outs; ++o) std::memcpy(static_cast<T*>(outs[o]) + begin, to, m * sizeof(T));
  }
}

// As a binary counter carries: behind source s, as many branches end as its number ends with ones.
template <class T>
KHPC_INLINE void sum_in_tree_as(const Source* sources, size_t n, void* const* outs, size_t n_outs, size_t count) {
  constexpr size_t block = 512;  // elements; all sums stay in the first-level cache
  constexpr size_t levels = 33;  // more than any number of sources has
  static thread_local std::vector<T> memory(levels * block);
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t m = std::min(block, count - begin);
    T* top = memory.data();  // behind the sums of branches that wait for later ones
    const auto merge = [&]() __attribute__((always_inline)) {
      top -= block;
      for (size_t i = 0; i < m; ++i) top[i - block] += top[i];
    };
    for (size_t s = 0; s < n; ++s) {
      const T* x = static_cast<const T*>(sources[s].data) + begin;
      const T factor = static_cast<T>(sources[s].factor);
      if (factor == 0)
        std::fill(top, top + m, T{});
      else
        for (size_t i = 0; i < m; ++i) top[i] = x[i] * factor;
      top += block;
      for (size_t ones = s; ones & 1; ones >>= 1) merge();
    }
    while (top > memory.data() + block) merge();
    for (size_t o = 0; o < n_outs; ++o) std::memcpy(static_cast<T*>(outs[o]) + begin, memory.data(), m * sizeof(T));
  }
}

// A function for each type: compilers need twice the time for one of all, and clang makes no clones of a template.
#define KHPC_REDUCE(name, T)                                                                                    \
  KHPC_CLONES void name(Op op, const Source* sources, size_t n, bool weighted, double scale, void* const* outs, \
                        size_t n_outs, size_t count) {                                                          \
    if (op == Op::min)                                                                                          \
      reduce_as<T, Op::min>(sources, n, weighted, scale, outs, n_outs, count);                                  \
    else if (op == Op::max)                                                                                     \
      reduce_as<T, Op::max>(sources, n, weighted, scale, outs, n_outs, count);                                  \
    else if (op == Op::product)                                                                                 \
      reduce_as<T, Op::product>(sources, n, weighted, scale, outs, n_outs, count);                              \
    else                                                                                                        \
      reduce_as<T, Op::sum>(sources, n, weighted, scale, outs, n_outs, count);                                  \
  }
KHPC_REDUCE(reduce_float16, Float16)
KHPC_REDUCE(reduce_bfloat16, BFloat16)
KHPC_REDUCE(reduce_float32, float)
KHPC_REDUCE(reduce_float64, double)
KHPC_REDUCE(reduce_int32, int32_t)
KHPC_REDUCE(reduce_int64, int64_t)
#undef KHPC_REDUCE

// Arithmetic as IEEE 754 has it, whoever computes: threads of frameworks take values below 2^-126 for zero, and results
// must not depend on which thread comes to compute them.
class PlainArithmetic {
 public:
#if defined(__SSE2__)
  PlainArithmetic() : before_(_mm_getcsr()) {
    if (before_ & kSpecial) _mm_setcsr(before_ & ~kSpecial);
  }
  ~PlainArithmetic() {
    if (before_ & kSpecial) _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kSpecial = 0xe040;  // denormals are zero, rounding, results that are denormal become zero
  const unsigned before_;
#elif defined(__aarch64__)
  PlainArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_ & kSpecial) asm volatile("msr fpcr, %0" : : "r"(before_ & ~kSpecial));
  }
  ~PlainArithmetic() {
    if (before_ & kSpecial) asm volatile("msr fpcr, %0" : : "r"(before_));
  }

 private:
  static constexpr uint64_t kSpecial = 0x1c80000;  // denormals are zero (also those of 16 bits), rounding
  uint64_t before_ = 0;
#else
  PlainArithmetic() {}
#endif
};

}  // namespace

void reduce(DType dtype, Op op, const Source* sources, size_t n_sources, bool weighted, double scale, void* const* outs,
            size_t n_outs, size_t count) {
  const PlainArithmetic plain;
  const auto with = [&](auto reduce_array) {
    reduce_array(op, sources, n_sources, weighted, scale, outs, n_outs, count);
  };
  switch (dtype) {
    case DType::float16:
      return with(reduce_float16);
    case DType::bfloat16:
      return with(reduce_bfloat16);
    case DType::float32:
      return with(reduce_float32);
    case DType::float64:
      return with(reduce_float64);
    case DType::int32:
      return with(reduce_int32);
    case DType::int64:
      return with(reduce_int64);
  }
}

KHPC_CLONES void sum_in_tree(DType dtype, const Source* sources, size_t n_sources, void* const* outs, size_t n_outs,
                             size_t count) {
  const PlainArithmetic plain;
  if (dtype == DType::float32)
    sum_in_tree_as<float>(sources, n_sources, outs, n_outs, count);
  else if (dtype == DType::float64)
    sum_in_tree_as<double>(sources, n_sources, outs, n_outs, count);
  else
    throw Error("Expected float32 or float64 for a sum in the order of a tree.");
}

KHPC_CLONES void to_16_bits(DType dtype, const float* from, void* to, size_t count) {
  const PlainArithmetic plain;
  if (dtype == DType::float16)
    for (size_t i = 0; i < count; ++i) narrow(from[i], static_cast<Float16*>(to)[i]);
  else
    for (size_t i = 0; i < count; ++i) narrow(from[i], static_cast<BFloat16*>(to)[i]);
}

KHPC_CLONES void from_16_bits(DType dtype, const void* from, float* to, size_t count) {
  const PlainArithmetic plain;
  if (dtype == DType::float16)
    for (size_t i = 0; i < count; ++i) to[i] = widen(static_cast<const Float16*>(from)[i]);
  else
    for (size_t i = 0; i < count; ++i) to[i] = widen(static_cast<const BFloat16*>(from)[i]);
}

void fill_neutral(DType dtype, void* to, size_t nbytes) {
  const size_t size = size_of(dtype);
  std::memset(to, 0, nbytes);
  if (dtype == DType::int32 || dtype == DType::int64) return;
  // The sign is in the last byte: processors that this runs on are little-endian.
  for (size_t i = size - 1; i < nbytes; i += size) static_cast<std::byte*>(to)[i] = std::byte{0x80};
}

KHPC_CLONES void copy_shared(void* to, const void* from, size_t nbytes) {
  typedef int64_t Line __attribute__((vector_size(64), aligned(1), may_alias));  // `using` loses aligned(1) with clang
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  size_t i = 0;
  for (; i + 256 <= nbytes; i += 256) {
    const Line a = *reinterpret_cast<const Line*>(in + i);
    const Line b = *reinterpret_cast<const Line*>(in + i + 64);
    const Line c = *reinterpret_cast<const Line*>(in + i + 128);
    const Line d = *reinterpret_cast<const Line*>(in + i + 192);
    *reinterpret_cast<Line*>(out + i) = a;
    *reinterpret_cast<Line*>(out + i + 64) = b;
    *reinterpret_cast<Line*>(out + i + 128) = c;
    *reinterpret_cast<Line*>(out + i + 192) = d;
  }
  if (i < nbytes) std::memcpy(out + i, in + i, nbytes - i);
}

void copy_streaming(void* to, const void* from, size_t nbytes) {
#if defined(__SSE2__)
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  size_t i = std::min(nbytes, (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64);
  std::memcpy(out, in, i);
  for (; i + 64 <= nbytes; i += 64)  // whole cache lines
    for (size_t part = 0; part < 64; part += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i + part)));
  std::memcpy(out + i, in + i, nbytes - i);
  _mm_sfence();  // before anybody is told
#else
  std::memcpy(to, from, nbytes);
#endif
}

}  // namespace keras_hpc
