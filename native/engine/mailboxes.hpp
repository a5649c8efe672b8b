// SPDX-License-Identifier: Apache-2.0
// Streams of bytes between the ranks of a node: one for each ordered pair, in shared memory, in which a rank writes for
// the other as much as there is room for. Counters only grow.
#pragma once
#include <cstddef>
#include <memory>

#include "engine/context.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

class Mailboxes {
 public:
  // Collective.
  Mailboxes(const TeamContext& team, Transport& transport, Channel& control);

  // Both take local ranks, copy what they can, at most `nbytes`, and return how much. They wake nobody: notify() does.
  size_t write(int to, const void* data, size_t nbytes);
  size_t read(int from, void* data, size_t nbytes);
  // Wakes a rank that may wait for what this one has written or read.
  void notify(int local_rank);
  size_t segment_bytes() const { return segment_->nbytes(); }

 private:
  struct Box;
  Box& box(int from, int to) const;

  const TeamContext& team_;
  std::unique_ptr<Segment> segment_;
};

}  // namespace keras_hpc
