// SPDX-License-Identifier: Apache-2.0
#include "engine/layout.hpp"

#include <algorithm>
#include <map>

namespace keras_hpc {
namespace {

constexpr size_t kAlign = 64;  // a cache line
// Side by side, a tensor with fewer bytes begins where the one before ends: what travels is not mostly gaps.
constexpr size_t kOwnLineBytes = 512;
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

Layout::Layout(const std::vector<TensorSpec>& tensors, int lanes, BucketBytes bucket_bytes,
               const std::vector<std::vector<Run>>& runs, bool side_by_side)
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
    const size_t most = nbytes_ < all - all / 10 ? bucket_bytes.most : bucket_bytes.last;
    const bool small = side_by_side && size < std::min(kOwnLineBytes, most + 1);
    const bool joins =
        small && open.dtype == tensor.dtype && open.end > open.begin && nbytes_ + size <= open.begin + most;
    const size_t begin = joins ? nbytes_ : align(nbytes_);
    const size_t end = begin + (small ? size : align(size));
    ranges_.push_back({begin, begin + size});
    const std::vector<Run> of_all = {{size, -1}};
    const std::vector<Run>& of_tensor = runs.empty() || runs[t].empty() ? of_all : runs[t];
    size_t run_begin = begin;
    for (size_t r = 0; r < of_tensor.size(); ++r) {
      const size_t run_size = begin + of_tensor[r].end - run_begin;
      const size_t run_end = r + 1 < of_tensor.size() ? run_begin + run_size : end;
      if (open.dtype != tensor.dtype || open.owner != of_tensor[r].owner || run_end - open.begin > most) close();
      if (open.begin == open.end) {
        open.begin = open.end = run_begin;
        open.first = static_cast<int>(t);
        open.dtype = tensor.dtype;
        open.owner = of_tensor[r].owner;
      }
      open.last = static_cast<int>(t);
      if (run_size > most) {  // cut a large one into parts of equal size
        const size_t parts = (run_size + most - 1) / most;
        for (size_t part = 0; part < parts; ++part) {
          open.end = part + 1 < parts ? run_begin + align((run_end - run_begin) * (part + 1) / parts) : run_end;
          close();
        }
      }
      open.end = run_end;
      if (run_size > most) open.begin = run_end;
      run_begin = run_end;
    }
    nbytes_ = end;
  }
  close();
  nbytes_ = align(nbytes_);
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

void Layout::alternate_owners() {
  for (auto& lane : lanes_) {
    std::map<int, std::vector<int>> of_owner;
    for (const int b : lane) of_owner[buckets_[static_cast<size_t>(b)].owner].push_back(b);
    const size_t count = lane.size();
    lane.clear();
    for (size_t i = 0; lane.size() < count; ++i)
      for (const auto& [owner, owned] : of_owner)
        if (i < owned.size()) {
          buckets_[static_cast<size_t>(owned[i])].number = static_cast<int>(lane.size());
          lane.push_back(owned[i]);
        }
  }
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
