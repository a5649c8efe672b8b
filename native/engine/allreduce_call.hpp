// SPDX-License-Identifier: Apache-2.0
// Allreduce of one buffer by a call that returns when it is done: for arrays, and for measuring.
//
// Every call begins with a post: each rank of the node says in shared memory what it wants to reduce, and waits until
// all have. So a rank that asks for something else is an error on all, and a rank that never comes is named. Then, by
// size and place of the data:
//   slot     the data lie in the post itself; every rank adds up all of them. One synchronisation.
//   push     the data lie in an area that all ranks of the node can reach: each rank reduces its slice of all arrays
//            in place and writes the result into all of them. No copy, two synchronisations.
//   staged   the data are private: chunk by chunk, each rank copies the slices that others own into shared memory, and
//            the results back.
//   library  the MPI library's own allreduce.
// Across nodes, the owners of a slice reduce it among themselves before it is handed out.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/allreduce.hpp"
#include "engine/area.hpp"
#include "engine/context.hpp"
#include "engine/layout.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

enum class Path { slot, push, staged, library, unknown };
const char* name_of(Path path);
Path parse_path(const std::string& name);

class AllreduceCall {
 public:
  // Collective.
  AllreduceCall(const TeamContext& team, Transport& transport, Channel& control);
  ~AllreduceCall();

  // Collective. Reduces in place, and returns when this rank may use `data` again. Thread-safe, but one at a time.
  void run(void* data, size_t count, DType dtype, Op op);
  // The same on a path of the caller's choice, the same on all ranks. Throws Error where it cannot be taken.
  void run(void* data, size_t count, DType dtype, Op op, Path path);
  // Which way a call takes is measured when its size class is first needed, and all ranks agree. It can be known from
  // an earlier job, or given by the user. Collective in effect: the same on all ranks.
  struct Choice {
    bool in_area;
    size_t from, to;  // bytes, [from, to)
    Path path;
  };
  void add_choice(const Choice& choice);  // wins over those added before
  std::vector<Choice> choices() const;
  // The way of a call, as far as it is known.
  std::optional<Path> choice_for(const void* data, size_t nbytes) const;
  bool can(Path path, const void* data, size_t count, DType dtype, Op op) const;

  // Collective. The area lives as long as the pointer.
  std::shared_ptr<Area> make_area(size_t nbytes);

  size_t segment_bytes() const { return segment_ ? segment_->nbytes() : 0; }

  static constexpr size_t kSlotBytes = size_t{64} << 10;
  static constexpr size_t kStageBytes = size_t{512} << 10;

 private:
  struct Post;      // what a rank wants, in the segment
  struct Counters;  // of one rank, in the segment
  struct Buffer {
    std::byte* data;
    size_t count;
    DType dtype;
    Op op;
    double scale;
    int64_t signature;
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
  // A way that is always possible.
  Path fallback(const void* data, size_t nbytes) const;
  std::vector<double> gather(const std::vector<double>& mine);  // of all ranks
  void slot(const Buffer& buffer);
  void push(const Buffer& buffer);
  void staged(const Buffer& buffer);
  void library(const Buffer& buffer);

  Post& post_of(int local_rank) const;  // of the current call
  std::byte* payload(int local_rank, size_t nbytes) const;
  std::byte* stage_of(int local_rank, uint64_t call) const;
  std::byte* result_of(int owner, uint64_t call) const;  // where an owner leaves its slice
  // Begins a call: says what this rank wants.
  void post(int64_t signature, int64_t place, const void* data = nullptr, size_t nbytes = 0);
  // Waits until all ranks of the node have posted; throws PlanMismatch unless all want the same.
  void meet();
  void wake_others();
  void hand_out(uint64_t call);
  void wait_until_handed_out(int owners, uint64_t call);
  void consumed(uint64_t call);
  void stage_in(const Chunk& chunk, uint64_t call);
  void reduce_stage(const Buffer& buffer, const Chunk& chunk, uint64_t call);
  void stage_out(const Chunk& chunk, uint64_t call);

  // Between the owners of the same slice on all nodes.
  void across_nodes(void* data, size_t count, DType dtype, Op op, int tag);
  // The first ranks of all nodes tell each other what they want, and their data. Returns what another one wants, if it
  // is something else.
  int64_t exchange(int64_t signature, const void* data, size_t nbytes);
  // After meet(): throws PlanMismatch unless other nodes want the same. The first rank's data go along.
  void compare_nodes(const void* data = nullptr, size_t nbytes = 0);
  std::byte* message(size_t node);

  template <class Value>
  void wait_for_ranks(int ranks, uint64_t target, Value&& value);
  template <class Ready>
  void poll(Ready&& ready, int peer);
  std::string late_text() const;

  const TeamContext& team_;
  const Topology& topology_;
  Transport& transport_;
  Channel& control_;  // for making areas
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<Segment> segment_;
  Counters* counters_ = nullptr;  // [local rank]
  std::byte* posts_ = nullptr;    // [2][local rank]
  std::byte* stages_ = nullptr;   // [2][local rank]

  std::mutex mutex_;  // one call at a time
  uint64_t call_ = 0;
  bool unannounced_ = false;         // something that others may sleep for
  uint64_t stage_used_[2] = {0, 0};  // the last call that used the stage
  std::vector<Source> sources_;
  std::vector<void*> outs_;
  std::vector<std::byte> messages_;  // [node]

  mutable std::mutex choices_mutex_;
  std::vector<Choice> choices_;
  mutable std::mutex areas_mutex_;
  std::atomic<int> next_area_{1};
  std::vector<std::weak_ptr<Area>> areas_;
};

}  // namespace keras_hpc
