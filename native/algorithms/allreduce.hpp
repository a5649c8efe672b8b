// SPDX-License-Identifier: Apache-2.0
// Allreduce of one buffer across nodes, one algorithm per file, one signature.
//
// Each is a state machine: advance() does what can be done now and never blocks. So one thread drives many reductions,
// those of several plans too, and ranks that reach two plans in different orders cannot deadlock.
//
// All ranks get the same bits: every element is summed once, by one rank or in the same order by all.
#pragma once
#include <memory>
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
  virtual const char* name() const = 0;
};

struct AllreduceArgs {
  Channel& channel;
  std::vector<int> peers;  // the ranks that take part, in the same order on all of them; two or more
  int me;                  // index of this rank in `peers`
  void* data;              // reduced in place
  size_t count;            // elements
  DType dtype;
  Op op;    // mean is a sum here
  int tag;  // no other operation between these ranks uses it at the same time
};

// ceil(log2 p) steps of the whole buffer (2 more where p is no power of two): best for small buffers.
// R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH (2005).
std::unique_ptr<Allreduce> recursive_doubling(const AllreduceArgs& args);

// 2 (p - 1) steps of 1/p of the buffer each, every rank sends 2 (p - 1) / p of it: best for large buffers.
// P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations (2009).
std::unique_ptr<Allreduce> ring(const AllreduceArgs& args);

// The algorithm for this size.
std::unique_ptr<Allreduce> make_allreduce(const AllreduceArgs& args);

}  // namespace keras_hpc
