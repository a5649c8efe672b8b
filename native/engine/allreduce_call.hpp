// SPDX-License-Identifier: Apache-2.0
// Allreduce of one buffer by a call that returns when it is done: for arrays, and for measuring.
//
// Every call begins with a meeting (meeting.hpp). Then, by size and place of the data:
//   slot     the data lie in the post itself; every rank adds up all of them. One synchronisation.
//   push     the data lie in an area that all ranks of the node can reach: each rank reduces its slice of all arrays
//            in place and writes the result into all of them. No copy, two synchronisations.
//   staged   the data are private: chunk by chunk, each rank copies the slices that others own into shared memory, and
//            the results back.
//   library  the MPI library's own allreduce.
// Across nodes, the owners of a slice reduce it among themselves before it is handed out.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.hpp"
#include "engine/area.hpp"
#include "engine/choices.hpp"
#include "engine/context.hpp"
#include "engine/layout.hpp"
#include "engine/meeting.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

// Ranks ask for different things; `mine` says what this one asks for.
struct Disagreement : PlanMismatch {
  Disagreement(const std::string& text, std::string asked) : PlanMismatch(text), mine(std::move(asked)) {}
  std::string mine;
};

class AllreduceCall {
 public:
  // Collective.
  AllreduceCall(const TeamContext& team, Transport& transport, Channel& control);
  ~AllreduceCall();

  // Collective. Reduces in place, and returns when this rank may use `data` again. Thread-safe, but one at a time.
  // Between nodes, float32 is rounded to the 16 bits of `wire`, if given. On a path of the caller's choice, if given:
  // the same on all ranks; throws Error where it cannot be taken.
  // `tag` stands for what else must be equal on all ranks. Throws Disagreement on all ranks.
  void run(void* data, size_t count, DType dtype, Op op, std::optional<DType> wire = std::nullopt,
           std::optional<Path> path = std::nullopt, uint64_t tag = 0);
  // Collective: meets the other ranks in a call that is no allreduce. Throws PlanMismatch on all ranks unless all are
  // in a call with this tag. `label` names it.
  void meet(uint64_t tag, const std::string& label);
  bool can(Path path, const void* data, size_t count, DType dtype, Op op) const;

  // The way of a call is measured when its size class is first needed, unless it is known.
  Choices& choices() { return choices_; }
  // The way that a call takes, as far as it is known. `rounds`: its values are rounded between nodes.
  Path way_of(const void* data, size_t count, DType dtype, Op op, bool rounds) const;
  // How slices of so many bytes go from node to node. Collective if `measured`: then it is measured unless known.
  Algorithm algorithm_for(size_t nbytes, bool measured);

  // Collective on the channel. The area lives as long as the pointer.
  std::shared_ptr<Area> make_area(Channel& channel, size_t nbytes);

  size_t segment_bytes() const;

  static constexpr size_t kSlotBytes = Meeting::kSlotBytes;
  static constexpr size_t kStageBytes = size_t{512} << 10;

 private:
  struct Buffer {
    std::byte* data;
    size_t count;
    DType dtype;
    Op op;
    DType wire;
    double scale;
    int64_t signature;
    uint64_t tag = 0;
    size_t nbytes() const { return count * size_of(dtype); }
  };
  struct Chunk {
    std::byte* data;
    size_t nbytes;
  };

  std::shared_ptr<Area> area_of(const void* data, size_t nbytes) const;
  bool owns_slice() const { return topology_.local_rank < topology_.owners; }

  void take(Path path, const Buffer& buffer);
  // Collective: times the ways of this buffer's size class, and remembers the best.
  Path measure(const Buffer& buffer, bool in_area);
  Algorithm measure_network(size_t nbytes);
  struct Candidate {
    int way;
    std::function<void()> run;
    double handicap;
  };
  int fastest(const std::vector<Candidate>& candidates, float* data, size_t count);
  // A way that is always possible.
  Path fallback(const void* data, size_t nbytes) const;
  void slot(const Buffer& buffer);
  void push(const Buffer& buffer);
  void staged(const Buffer& buffer);
  void library(const Buffer& buffer);

  // Of what reduce_node() makes of `sources_`, a segment at a time, into all `outs_`.
  void across_nodes(const Buffer& buffer, size_t count);
  std::byte* stage_of(int local_rank, uint64_t call) const;
  std::byte* result_of(int owner, uint64_t call) const;  // where an owner leaves its slice
  void stage_in(const Chunk& chunk, uint64_t call);
  void reduce_stage(const Buffer& buffer, const Chunk& chunk, uint64_t call);
  void stage_out(const Chunk& chunk, uint64_t call);

  const TeamContext& team_;
  const Topology& topology_;
  Transport& transport_;
  std::unique_ptr<Meeting> meeting_;  // none for one rank
  std::unique_ptr<Segment> stages_;   // [2][local rank]

  std::mutex mutex_;                 // one call at a time
  uint64_t stage_used_[2] = {0, 0};  // the last call that used the stage
  std::vector<Source> sources_;
  std::vector<void*> outs_;

  Choices choices_;
  mutable std::mutex areas_mutex_;
  std::atomic<int> next_area_{1};
  std::vector<std::weak_ptr<Area>> areas_;
};

}  // namespace keras_hpc
