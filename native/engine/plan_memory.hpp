// SPDX-License-Identifier: Apache-2.0
// The segment of a plan: what the ranks of a node count, and where each puts what others need.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/context.hpp"
#include "engine/layout.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

// A bucket in one execution.
struct Turn {
  uint64_t number;  // over all executions of its lane
  int index;        // of the bucket
  const Bucket& bucket;
};

// What happens to a bucket on a rank, in this order.
enum class Stage { packed, reduced, copied };

class PlanMemory {
 public:
  // Collective. With `in_segment` the tensors themselves live here, and only small buckets need places.
  PlanMemory(const TeamContext& team, const Layout& layout, int owners, int lanes, bool in_segment,
             Transport& transport, Channel& control);

  Turn turn(int lane, uint64_t number) const;
  // How many buckets of a lane a rank has taken through a stage, over all executions; the lowest of the first `ranks`.
  uint64_t count(Stage stage, int lane, int local_rank) const;
  uint64_t lowest(Stage stage, int lane, int ranks) const;
  void raise(Stage stage, int lane, uint64_t value);  // this rank's, by one; wakes whoever can go on now
  void note(Stage stage, int lane, uint64_t value);   // the same, where nobody waits for it

  // Buckets of a lane that have a place at the same time. One is free when all ranks have copied its results.
  uint64_t places(int lane) const { return lanes_[static_cast<size_t>(lane)].places; }
  bool has_place(int lane, uint64_t number) const {
    return !needs_place(lane, number) || lowest(Stage::copied, lane, topology_.local_size()) + places(lane) > number;
  }
  // Whether a bucket has no owners: each rank shows all of it to the others, and adds all of them up.
  bool is_small(const Bucket& bucket) const { return bucket.end - bucket.begin <= small_bytes_; }
  // Where a small bucket's bytes begin that a rank shows.
  std::byte* shown(const Turn& turn, int local_rank) const;
  // Where another one's begin: of what a rank has sent to an owner, and of an owner's results.
  std::byte* sent(const Turn& turn, int owner, int contributor) const;
  std::byte* result(const Turn& turn, int owner) const;
  std::byte* tensors_of(int local_rank) const;  // at their places in the layout, if they live here
  const std::shared_ptr<Segment>& segment() const { return segment_; }

  // In an execution; written before anything of it is packed. There are two, because a small bucket is back as soon as
  // all have packed it: a rank may begin the next execution while another one still reads the weights of this one.
  double& weight_of(int local_rank, uint64_t step) const;

 private:
  struct Shared;  // of one rank
  struct Counter;
  struct Lane {
    size_t first, places;
  };

  Counter& counter(Stage stage, int lane, int local_rank) const;
  bool needs_place(int lane, uint64_t number) const { return !in_segment_ || is_small(turn(lane, number).bucket); }
  std::byte* place(const Turn& turn) const;

  const TeamContext& team_;
  const Topology& topology_;
  const Layout& layout_;
  const int owners_;
  const bool in_segment_;
  const size_t small_bytes_;
  std::vector<Lane> lanes_;
  size_t slot_stride_, small_stride_, place_bytes_;
  std::shared_ptr<Segment> segment_;
  Shared* shared_;      // [local rank]
  Counter* counters_;   // [stage][lane][local rank]
  std::byte* places_;   // [place][slot]
  std::byte* tensors_;  // of each local rank, if they live here
};

}  // namespace keras_hpc
