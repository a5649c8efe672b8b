// SPDX-License-Identifier: Apache-2.0
#include "algorithms/segmented.hpp"

#include <algorithm>
#include <utility>

namespace keras_hpc {
namespace {

constexpr size_t kMessageBytes = size_t{256} << 10;

constexpr size_t kMostParts = 64;  // else the segments on the way take much memory

// Recursive doubling sends all of a segment, the others some of it to each peer.
size_t bytes_of_segment(Algorithm algorithm, size_t peers) {
  return kMessageBytes * (algorithm == Algorithm::recursive_doubling ? 1 : std::min(peers, kMostParts));
}

}  // namespace

size_t SegmentedAllreduce::nbytes(Algorithm algorithm, size_t peers) {
  return kTags * bytes_of_segment(algorithm, peers);
}

SegmentedAllreduce::SegmentedAllreduce(Channel& channel, const Peers& peers, int first_tag, Algorithm algorithm,
                                       const AllreduceBuffer& buffer, OnSegment before, OnSegment after)
    : schedules_(peers),
      algorithm_(algorithm),
      b_(buffer),
      before_(std::move(before)),
      after_(std::move(after)),
      nbytes_(bytes_of_segment(algorithm, peers.ranks.size())),
      length_(nbytes_ / size_of(buffer.dtype)) {
  for (int tag = first_tag; tag < first_tag + kTags; ++tag) operations_.emplace_back(channel, schedules_, tag);
}

Progress SegmentedAllreduce::advance() {
  bool moved = false;
  do {
    while (next_ < b_.count && active_.size() < kTags) {
      begin_next();
      moved = true;
    }
    for (Segment& segment : active_) {
      if (segment.done) continue;
      const Progress progress = segment.operation->advance();
      moved = moved || progress != Progress::none;
      if (progress != Progress::done) continue;
      segment.done = true;
      after_(segment.begin, segment.count, segment.data);
    }
    while (!active_.empty() && active_.front().done) active_.pop_front();
  } while (next_ < b_.count && active_.size() < kTags);
  if (active_.empty()) return Progress::done;
  return moved ? Progress::some : Progress::none;
}

int SegmentedAllreduce::waiting_for() const {
  const Peers& peers = schedules_.peers();
  return active_.empty() ? peers.ranks[static_cast<size_t>(peers.me)] : active_.front().operation->waiting_for();
}

// All ranks begin segments in the same order, and one only when the last with the same tag, and place, is done.
void SegmentedAllreduce::begin_next() {
  AllreduceBuffer part = b_;
  part.count = std::min(length_, b_.count - next_);
  const size_t place = begun_++ % kTags;
  std::byte* data = static_cast<std::byte*>(b_.data) + place * nbytes_;
  part.data = data;
  before_(next_, part.count, data);
  operations_[place].begin(algorithm_, part);
  active_.push_back({next_, part.count, data, &operations_[place]});
  next_ += part.count;
}

}  // namespace keras_hpc
