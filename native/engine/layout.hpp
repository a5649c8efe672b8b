// SPDX-License-Identifier: Apache-2.0
// Where the tensors of a plan lie in its buffer, and how the buffer is cut. Pure arithmetic, the same on every rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "algorithms/kernels.hpp"
#include "transport/topology.hpp"

namespace keras_hpc {

struct TensorSpec {
  std::string name;
  DType dtype;
  int64_t count;  // elements
};

// What is reduced at once: a range of the buffer that holds some small tensors, or a part of a large one. Never two
// dtypes, nor what two ranks own. Its bytes are cut into one slice per owner, unless one rank owns all of it.
struct Bucket {
  size_t begin, end;  // bytes in the buffer
  int first, last;    // tensors
  DType dtype;
  int lane;    // the lane that reduces it
  int owner;   // the rank of the node that has all of it; -1: it is cut into slices
  int number;  // its place among the lane's buckets: they are reduced in this order
};

struct Range {
  size_t begin, end;
  bool empty() const { return begin >= end; }
  size_t size() const { return empty() ? 0 : end - begin; }
};

// Neighbouring bytes of a tensor, from where the run before has ended, that one rank of the node owns (-1: nobody
// alone).
struct Run {
  size_t end;
  int owner;
};

// How large buckets may be.
struct BucketBytes {
  size_t most;
  size_t last;  // of the last tenth of all bytes: nothing is computed any more while the last bucket is reduced

  // `most` as asked for, or, with 0, as fits the nodes and their ranks.
  static BucketBytes of(const Topology& topology, size_t asked);
};

class Layout {
 public:
  // Buckets are dealt to the lanes in turn. `runs` of each tensor; none: nobody alone owns any of it. They end where
  // the tensor does, and elsewhere at multiples of 64 bytes. `side_by_side`, without runs: small tensors of a bucket
  // have no gaps between them.
  Layout(const std::vector<TensorSpec>& tensors, int lanes, BucketBytes bucket_bytes,
         const std::vector<std::vector<Run>>& runs = {}, bool side_by_side = false);

  // Lets lanes take buckets of the owners in turn. For tensors that are all started at once: so all owners are at work
  // at the same time.
  void alternate_owners();

  int tensor_count() const { return static_cast<int>(ranges_.size()); }
  size_t nbytes() const { return nbytes_; }
  // The tensor's place in the buffer; aligned to 64 bytes, or, side by side, to its elements.
  const Range& range(int tensor) const { return ranges_[static_cast<size_t>(tensor)]; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  // Indices of the buckets that hold the tensor: [first, second).
  std::pair<int, int> buckets_of(int tensor) const { return buckets_of_[static_cast<size_t>(tensor)]; }
  const std::vector<int>& buckets_of_lane(int lane) const { return lanes_[static_cast<size_t>(lane)]; }

  // Slice `slice` of `owners` of a bucket; slices begin at multiples of 64 bytes.
  static Range slice(const Bucket& bucket, int slice, int owners);
  // The part of the tensor within a range of the buffer.
  Range part(int tensor, const Range& within) const;

 private:
  void add_bucket(Bucket bucket);

  std::vector<Range> ranges_;
  std::vector<std::pair<int, int>> buckets_of_;
  std::vector<Bucket> buckets_;
  std::vector<std::vector<int>> lanes_;
  size_t nbytes_ = 0;
};

}  // namespace keras_hpc
