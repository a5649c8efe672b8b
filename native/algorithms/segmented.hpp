// SPDX-License-Identifier: Apache-2.0
// Allreduce of one large buffer across nodes, in segments of which some are on the way at once: while one travels,
// another is added up.
#pragma once
#include <deque>
#include <functional>
#include <vector>

#include "algorithms/allreduce.hpp"

namespace keras_hpc {

// What is done with a segment.
using OnSegment = std::function<void(size_t first_element, size_t elements, std::byte* data)>;

class SegmentedAllreduce {
 public:
  static constexpr int kTags = 4;  // it uses so many in all

  // Memory for the segments on the way.
  static size_t nbytes(Algorithm algorithm, size_t peers);

  // `buffer.data` is memory for those on the way: nbytes(), or less if there is less to reduce. `before` puts a segment
  // there before it sets out, and `after` takes it when it has come back.
  SegmentedAllreduce(Channel& channel, const Peers& peers, int first_tag, Algorithm algorithm,
                     const AllreduceBuffer& buffer, OnSegment before, OnSegment after);

  Progress advance();
  // The rank whose message is awaited.
  int waiting_for() const;

 private:
  struct Segment {
    size_t begin, count;
    std::byte* data;
    Allreduce* operation;
    bool done = false;
  };

  void begin_next();

  Schedules schedules_;
  const Algorithm algorithm_;
  const AllreduceBuffer b_;
  const OnSegment before_, after_;
  const size_t nbytes_;  // of a segment
  const size_t length_;  // elements
  size_t next_ = 0;
  size_t begun_ = 0;
  std::deque<Allreduce> operations_;  // one per place
  std::deque<Segment> active_;
};

}  // namespace keras_hpc
