// SPDX-License-Identifier: Apache-2.0
#include "algorithms/wire.hpp"

#include <algorithm>
#include <cstdint>

namespace keras_hpc {
namespace {

constexpr size_t kBlock = 1024;  // elements; what is decoded stays in the first-level cache

}  // namespace

void Wire::set(DType data, DType wire) {
  data_ = data;
  wire_ = data == DType::float32 ? wire : data;
}

void Wire::encode(const void* data, void* sent, size_t count) const {
  to_16_bits(wire_, static_cast<const float*>(data), sent, count);
}

void Wire::decode(const void* received, void* data, size_t count) const {
  from_16_bits(wire_, received, static_cast<float*>(data), count);
}

void Wire::sum_in_tree(void* data, const std::vector<const void*>& received, size_t mine, size_t count) {
  sources_.resize(received.size() + 1);
  for (size_t i = 0; i < sources_.size(); ++i) sources_[i] = {i == mine ? data : received[i - (i > mine)], 1.0};
  keras_hpc::sum_in_tree(data_, sources_.data(), sources_.size(), &data, 1, count);
}

void Wire::combine(Op op, void* data, const std::vector<const void*>& received, size_t mine, size_t count) {
  const size_t n = received.size() + 1;
  sources_.resize(n);
  if (!rounds()) {
    for (size_t i = 0; i < n; ++i) sources_[i] = {i == mine ? data : received[i - (i > mine)], 1.0};
    return reduce(data_, op, sources_.data(), n, false, 1.0, &data, 1, count);
  }
  decoded_.resize(received.size() * kBlock);
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t m = std::min(kBlock, count - begin);
    void* out = static_cast<float*>(data) + begin;
    for (size_t i = 0; i < received.size(); ++i)
      from_16_bits(wire_, static_cast<const uint16_t*>(received[i]) + begin, decoded_.data() + i * kBlock, m);
    for (size_t i = 0; i < n; ++i) sources_[i] = {i == mine ? out : decoded_.data() + (i - (i > mine)) * kBlock, 1.0};
    reduce(data_, op, sources_.data(), n, false, 1.0, &out, 1, m);
  }
}

}  // namespace keras_hpc
