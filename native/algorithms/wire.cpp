// SPDX-License-Identifier: Apache-2.0
#include "algorithms/wire.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace keras_hpc {
namespace {

constexpr size_t kBlock = 1024;  // elements; what is decoded stays in the first-level cache

}  // namespace

void Wire::encode(const void* data, void* sent, size_t count) const {
  if (rounds())
    to_16_bits(wire_, static_cast<const float*>(data), sent, count);
  else
    std::memcpy(sent, data, nbytes(count));
}

void Wire::decode(const void* received, void* data, size_t count) const {
  if (rounds())
    from_16_bits(wire_, received, static_cast<float*>(data), count);
  else
    std::memcpy(data, received, nbytes(count));
}

void Wire::round(void* data, size_t count) const {
  if (!rounds()) return;
  uint16_t block[kBlock];
  auto* values = static_cast<float*>(data);
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t m = std::min(kBlock, count - begin);
    to_16_bits(wire_, values + begin, block, m);
    from_16_bits(wire_, block, values + begin, m);
  }
}

void Wire::combine(Op op, void* data, const std::vector<const void*>& received, size_t mine, size_t count) const {
  const size_t n = received.size() + 1;
  std::vector<Source> sources(n);
  if (!rounds()) {
    for (size_t i = 0; i < n; ++i) sources[i] = {i == mine ? data : received[i - (i > mine)], 1.0};
    return reduce(data_, op, sources.data(), n, false, 1.0, &data, 1, count);
  }
  std::vector<float> decoded(received.size() * kBlock);
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t m = std::min(kBlock, count - begin);
    void* out = static_cast<float*>(data) + begin;
    for (size_t i = 0; i < received.size(); ++i)
      from_16_bits(wire_, static_cast<const uint16_t*>(received[i]) + begin, decoded.data() + i * kBlock, m);
    for (size_t i = 0; i < n; ++i) sources[i] = {i == mine ? out : decoded.data() + (i - (i > mine)) * kBlock, 1.0};
    reduce(data_, op, sources.data(), n, false, 1.0, &out, 1, m);
  }
}

}  // namespace keras_hpc
