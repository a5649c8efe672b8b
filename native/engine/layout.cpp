// SPDX-License-Identifier: Apache-2.0
#include "engine/layout.hpp"

#include <algorithm>

namespace keras_hpc {
namespace {

constexpr size_t kAlign = 64;  // a cache line
size_t align(size_t nbytes) {
  return (nbytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

Layout::Layout(const std::vector<TensorSpec>& tensors, int lanes, size_t bucket_bytes)
    : lanes_(static_cast<size_t>(lanes)) {
  Bucket open{};  // being filled
  const auto close = [&] {
    if (open.end > open.begin) add_bucket(open);
    open.begin = open.end;
  };
  for (size_t t = 0; t < tensors.size(); ++t) {
    const TensorSpec& tensor = tensors[t];
    const size_t size = static_cast<size_t>(tensor.count) * size_of(tensor.dtype);
    const size_t end = nbytes_ + align(size);
    ranges_.push_back({nbytes_, nbytes_ + size});
    if (open.dtype != tensor.dtype || end - open.begin > bucket_bytes) close();
    if (open.begin == open.end) {
      open.first = static_cast<int>(t);
      open.dtype = tensor.dtype;
    }
    open.last = static_cast<int>(t);
    if (size > bucket_bytes) {  // cut a large tensor into parts of equal size
      const size_t parts = (size + bucket_bytes - 1) / bucket_bytes;
      for (size_t part = 0; part < parts; ++part) {
        open.end = part + 1 < parts ? nbytes_ + align((end - nbytes_) * (part + 1) / parts) : end;
        close();
      }
    }
    open.end = end;
    nbytes_ = end;
    if (size > bucket_bytes) open.begin = end;
  }
  close();
  for (int t = 0; t < tensor_count(); ++t) {
    std::pair<int, int> found{0, 0};
    for (int b = 0; b < static_cast<int>(buckets_.size()); ++b) {
      const Bucket& bucket = buckets_[static_cast<size_t>(b)];
      if (part(t, {bucket.begin, bucket.end}).empty()) continue;
      if (found.first == found.second) found = {b, b};
      found.second = b + 1;
    }
    buckets_of_.push_back(found);
  }
}

void Layout::add_bucket(Bucket bucket) {
  bucket.lane = static_cast<int>(buckets_.size() % lanes_.size());
  auto& lane = lanes_[static_cast<size_t>(bucket.lane)];
  bucket.number = static_cast<int>(lane.size());
  lane.push_back(static_cast<int>(buckets_.size()));
  buckets_.push_back(bucket);
}

Range Layout::slice(const Bucket& bucket, int slice, int owners) {
  const size_t length = bucket.end - bucket.begin;
  const auto bound = [&](int i) {
    return bucket.begin + std::min(length, align(length * static_cast<size_t>(i) / static_cast<size_t>(owners)));
  };
  return {bound(slice), bound(slice + 1)};
}

Range Layout::part(int tensor, const Range& within) const {
  const Range& r = range(tensor);
  return {std::max(r.begin, within.begin), std::min(r.end, within.end)};
}

}  // namespace keras_hpc
