// SPDX-License-Identifier: Apache-2.0
// Allreduce of one buffer across nodes.
//
// An operation is a state machine: advance() does what can be done now and never blocks. So one thread drives many
// reductions, those of several plans too, and ranks that reach two plans in different orders cannot deadlock.
//
// All ranks get the same bits: every element is summed once, by one rank or in the same order by all.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/kernels.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

class Allreduce {
 public:
  virtual ~Allreduce() = default;
  // True once `data` holds the result.
  virtual bool advance() = 0;
  // The rank whose message is awaited.
  virtual int waiting_for() const = 0;
};

// See schedule.hpp.
enum class Algorithm { recursive_doubling, rabenseifner, ring, pairwise };
constexpr Algorithm kAlgorithms[] = {Algorithm::recursive_doubling, Algorithm::rabenseifner, Algorithm::ring,
                                     Algorithm::pairwise};
const char* name_of(Algorithm algorithm);
Algorithm parse_algorithm(const std::string& name);
// A good guess where nothing has been measured.
Algorithm usual_algorithm(size_t nbytes, size_t peers);

struct AllreduceArgs {
  Channel& channel;
  std::vector<int> peers;  // the ranks that take part, in the same order on all of them; two or more
  int me;                  // index of this rank in `peers`
  void* data;              // reduced in place; the network works on it
  size_t count;            // elements
  DType dtype;
  DType wire;  // `dtype`, or 16 bits to which float32 is rounded while it travels
  Op op;       // mean is a sum here
  int tag;     // no other operation between these ranks uses it at the same time
  // Holds `data`. The network goes on using it after the operation was given up, so it is never the caller's.
  std::shared_ptr<void> memory;
};

std::unique_ptr<Allreduce> make_allreduce(Algorithm algorithm, const AllreduceArgs& args);

// The same, in segments of which some are on the way at once: while one travels, another is added up. `args.data` is
// memory for those on the way, segmented_bytes() of it. `before` puts a segment there before it sets out, and `after`
// takes it when it has come back: (first element, elements, where).
using OnSegment = std::function<void(size_t begin, size_t count, std::byte* data)>;
constexpr int kSegmentTags = 4;  // it uses args.tag and as many in all
size_t segmented_bytes(Algorithm algorithm, size_t peers);
std::unique_ptr<Allreduce> make_segmented(Algorithm algorithm, const AllreduceArgs& args, OnSegment before,
                                          OnSegment after);

}  // namespace keras_hpc
