// SPDX-License-Identifier: Apache-2.0
// How ranks reach each other. Two implementations: MPI, and in-process, where ranks are threads (mpi_transport.hpp,
// in_process.hpp). The algorithms and the engine above know only this interface.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "common/dtype.hpp"
#include "common/error.hpp"
#include "transport/links.hpp"
#include "transport/segment.hpp"
#include "transport/topology.hpp"

namespace keras_hpc {

// An operation in flight. Must not be destroyed before test() returned true: see pending.hpp.
class Request {
 public:
  virtual ~Request() = default;
  // True once the operation has finished; never blocks.
  virtual bool test() = 0;
  // Of a receive: nobody wants it any more. Whether it has finished: it has not if its message is just coming.
  virtual bool cancel() { return false; }
};
using RequestPtr = std::unique_ptr<Request>;

// A communicator of its own, duplicated from the team's: messages of two channels never meet. Messages between two
// ranks with equal tags arrive in the order they were sent. One thread at a time uses a channel.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual RequestPtr send(const void* data, size_t nbytes, int peer, int tag) = 0;
  // The message may be shorter than `nbytes`, not longer; where it goes in parts, as those of some GiB, neither.
  virtual RequestPtr receive(void* data, size_t nbytes, int peer, int tag) = 0;

  // Collective, each called by all ranks of the team in the same order.
  virtual RequestPtr broadcast(void* data, size_t nbytes, int root) = 0;
  virtual RequestPtr allgather(const void* in, void* out, const std::vector<size_t>& nbytes_by_rank) = 0;
  virtual RequestPtr barrier() = 0;
  // Something was lost here, or on another channel of the same network: nothing more should be sent.
  virtual bool has_failed() const { return false; }
  // The MPI library's own allreduce, in place. `op` is not mean. Whoever has none cannot do it.
  virtual bool can_allreduce(DType, Op) const { return false; }
  virtual void allreduce(void*, size_t, DType, Op) { throw Error("This transport has no allreduce of its own."); }
  virtual RequestPtr iallreduce(void*, size_t, DType, Op) { throw Error("This transport has no iallreduce."); }
};

class Transport {
 public:
  virtual ~Transport() = default;
  const Topology& topology() const { return topology_; }
  // Of waits for other ranks, in making segments.
  void set_time_limit(double seconds) { time_limit_ = seconds; }

  // How to wait for other ranks in making segments: returns once `ready` does, or throws.
  using Waiting = std::function<void(const std::function<bool()>& ready)>;
  void set_waiting(Waiting waiting) { waiting_ = std::move(waiting); }

  // Whether channels send and receive memory of GPUs.
  virtual bool takes_device_memory() const { return false; }

  // Its ranks have failed: messages may come that nobody receives. No channel may get them that is made later.
  virtual void abandon() {}

  // Collective.
  virtual std::unique_ptr<Channel> open_channel() = 0;
  // Collective. One that only the owners of this rank's slice have, on which the MPI library reduces; none where there
  // is no library. Not to be used by a rank that owns no slice.
  virtual std::unique_ptr<Channel> open_library_channel() { return nullptr; }
  // Collective. Ways to these ranks beside the channels; none where those do not fail.
  virtual std::unique_ptr<Links> open_links(Channel&, const std::vector<int>& /* peers */) { return nullptr; }
  // Collective: every rank of the team calls it; each node gets one segment that its ranks share. It begins with
  // `engine_bytes`, which forked children of a rank do not inherit; then each rank has `bytes_of_rank` of its own.
  virtual std::unique_ptr<Segment> open_segment(Channel& channel, size_t engine_bytes, size_t bytes_of_rank = 0) = 0;

 protected:
  explicit Transport(Topology topology) : topology_(std::move(topology)) {}
  double time_limit() const { return time_limit_; }
  const Waiting& waiting() const { return waiting_; }  // empty: nobody has said

 private:
  Topology topology_;
  double time_limit_ = 60;
  Waiting waiting_;
};

}  // namespace keras_hpc
