// SPDX-License-Identifier: Apache-2.0
#include "engine/layout.hpp"

#include <algorithm>

namespace keras_hpc {
namespace {

constexpr size_t kAlign = 64;  // a cache line
constexpr size_t kBucketBytes = 1 << 20, kLargeBucketBytes = 4 << 20;
constexpr int kManyNodes = 32;  // between which fewer, larger messages are faster
size_t align(size_t nbytes) {
  return (nbytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

BucketBytes BucketBytes::of(const Topology& topology, size_t asked) {
  const size_t usual = topology.node_count >= kManyNodes ? kLargeBucketBytes : kBucketBytes;
  const size_t most = asked > 0 ? asked : usual;
  return {most, std::min(most, kBucketBytes)};
}

Layout::Layout(const std::vector<TensorSpec>& tensors, int lanes, BucketBytes bucket_bytes)
    : lanes_(static_cast<size_t>(lanes)) {
  size_t all = 0;
  for (const TensorSpec& tensor : tensors) all += align(static_cast<size_t>(tensor.count) * size_of(tensor.dtype));
  Bucket open{};  // being filled
  const auto close = [&] {
    if (open.end > open.begin) add_bucket(open);
    open.begin = open.end;
  };
  for (size_t t = 0; t < tensors.size(); ++t) {
    const TensorSpec& tensor = tensors[t];
    const size_t size = static_cast<size_t>(tensor.count) * size_of(tensor.dtype);
    const size_t end = nbytes_ + align(size);
    const size_t most = nbytes_ < all - all / 10 ? bucket_bytes.most : bucket_bytes.last;
    ranges_.push_back({nbytes_, nbytes_ + size});
    if (open.dtype != tensor.dtype || end - open.begin > most) close();
    if (open.begin == open.end) {
      open.first = static_cast<int>(t);
      open.dtype = tensor.dtype;
    }
    open.last = static_cast<int>(t);
    if (size > most) {  // cut a large tensor into parts of equal size
      const size_t parts = (size + most - 1) / most;
      for (size_t part = 0; part < parts; ++part) {
        open.end = part + 1 < parts ? nbytes_ + align((end - nbytes_) * (part + 1) / parts) : end;
        close();
      }
    }
    open.end = end;
    nbytes_ = end;
    if (size > most) open.begin = end;
  }
  close();
  buckets_of_.resize(tensors.size());
  for (int b = 0; b < static_cast<int>(buckets_.size()); ++b) {
    const Bucket& bucket = buckets_[static_cast<size_t>(b)];
    for (int t = bucket.first; t <= bucket.last; ++t) {
      if (part(t, {bucket.begin, bucket.end}).empty()) continue;
      auto& [first, last] = buckets_of_[static_cast<size_t>(t)];
      if (first == last) first = b;
      last = b + 1;
    }
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
