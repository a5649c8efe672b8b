// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <utility>

#include "algorithms/allreduce.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kMessageBytes = size_t{256} << 10;

// Recursive doubling sends all of a segment, the others some of it to each peer.
size_t bytes_of_segment(Algorithm algorithm, size_t peers) {
  return kMessageBytes * (algorithm == Algorithm::recursive_doubling ? 1 : peers);
}

class Segmented final : public Allreduce {
 public:
  Segmented(Algorithm algorithm, const AllreduceArgs& args, OnSegment before, OnSegment after)
      : algorithm_(algorithm),
        a_(args),
        before_(std::move(before)),
        after_(std::move(after)),
        nbytes_(bytes_of_segment(algorithm, args.peers.size())),
        length_(nbytes_ / size_of(args.dtype)) {}

  bool advance() override {
    do {
      if (next_ < a_.count && active_.size() < kSegmentTags) begin_next();
      for (Part& part : active_) {
        if (!part.operation || !part.operation->advance()) continue;
        part.operation.reset();
        after_(part.begin, part.count, part.data);
      }
      while (!active_.empty() && !active_.front().operation) active_.pop_front();
    } while (next_ < a_.count && active_.size() < kSegmentTags);
    return active_.empty();
  }
  int waiting_for() const override {
    return active_.empty() ? a_.peers[static_cast<size_t>(a_.me)] : active_.front().operation->waiting_for();
  }

 private:
  struct Part {
    size_t begin, count;
    std::byte* data;
    std::unique_ptr<Allreduce> operation;  // null: done
  };

  // All ranks begin segments in the same order, and one only when the last with the same tag, and place, is done.
  void begin_next() {
    const size_t count = std::min(length_, a_.count - next_);
    const size_t place = begun_++ % kSegmentTags;
    std::byte* data = static_cast<std::byte*>(a_.data) + place * nbytes_;
    before_(next_, count, data);
    AllreduceArgs args = a_;
    args.data = data;
    args.count = count;
    args.tag = a_.tag + static_cast<int>(place);
    active_.push_back({next_, count, data, make_allreduce(algorithm_, args)});
    next_ += count;
  }

  Algorithm algorithm_;
  AllreduceArgs a_;
  OnSegment before_, after_;
  size_t nbytes_;  // of a segment
  size_t length_;  // elements
  size_t next_ = 0;
  size_t begun_ = 0;
  std::deque<Part> active_;
};

}  // namespace

size_t segmented_bytes(Algorithm algorithm, size_t peers) {
  return kSegmentTags * bytes_of_segment(algorithm, peers);
}

std::unique_ptr<Allreduce> make_segmented(Algorithm algorithm, const AllreduceArgs& args, OnSegment before,
                                          OnSegment after) {
  return std::make_unique<Segmented>(algorithm, args, std::move(before), std::move(after));
}

}  // namespace keras_hpc
