// SPDX-License-Identifier: Apache-2.0
// Streams of bytes between the ranks of a node: one for each ordered pair, in shared memory, in which a rank writes for
// the other as much as there is room for. Counters only grow. Only pairs that need one have one.
#pragma once
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/context.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

class Mailboxes {
 public:
  explicit Mailboxes(const TeamContext& team);
  ~Mailboxes();

  // Whether this rank can write for another one.
  bool reaches(int to) const;
  // Collective: lets this rank write for others, which it does not reach. No rank of the team has more than `most`.
  void add(const std::vector<int>& to, size_t most, Transport& transport, Channel& control);

  // Both take local ranks, copy what they can, at most `nbytes`, and return how much. They wake nobody: notify() does.
  size_t write(int to, const void* data, size_t nbytes);
  size_t read(int from, void* data, size_t nbytes);
  // Wakes a rank that may wait for what this one has written or read.
  void notify(int local_rank);
  size_t segment_bytes() const;

 private:
  struct Box;
  class Part;
  Box* box_of(int from);

  const TeamContext& team_;
  std::vector<Box*> mine_, theirs_;  // by local rank; null: none, or none that is known
  mutable std::mutex mutex_;         // of what follows
  std::deque<Part> parts_;
};

}  // namespace keras_hpc
