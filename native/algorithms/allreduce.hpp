// SPDX-License-Identifier: Apache-2.0
// Allreduce of one buffer across nodes.
//
// An operation is a state machine: advance() does what can be done now and never blocks. So one thread drives many
// reductions, those of several plans too, and ranks that reach two plans in different orders cannot deadlock.
//
// All ranks get the same bits: every element is summed once, by one rank or in the same order by all.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/kernels.hpp"
#include "algorithms/partial.hpp"
#include "algorithms/schedule.hpp"
#include "algorithms/wire.hpp"
#include "transport/pending.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

// See schedule.hpp; `library` is MPI_Iallreduce.
enum class Algorithm { recursive_doubling, rabenseifner, ring, pairwise, radix_k, library };
constexpr Algorithm kAlgorithms[] = {Algorithm::recursive_doubling, Algorithm::rabenseifner, Algorithm::ring,
                                     Algorithm::pairwise,           Algorithm::radix_k,      Algorithm::library};
const char* name_of(Algorithm algorithm);
Algorithm parse_algorithm(const std::string& name);
// A good guess where nothing has been measured.
Algorithm usual_algorithm(size_t nbytes, size_t peers);

// Ranks that reduce together.
struct Peers {
  std::vector<int> ranks;          // in the same order on all of them; two or more
  int me;                          // index of this rank among them
  Channel* mpi_channel = nullptr;  // theirs alone, for Algorithm::library; where it is missing they go the usual way
};

// The schedules of one rank, each made once.
class Schedules {
 public:
  explicit Schedules(Peers peers) : peers_(std::move(peers)) {}
  const Peers& peers() const { return peers_; }
  // For `count` elements. It lives as long as this. Between more than kPrunedPeers ranks everything travels: finding
  // out what nobody needs takes time that grows with the square of their number.
  static constexpr size_t kPrunedPeers = 128;
  const Schedule& of(Algorithm algorithm, size_t count, const Partial& how = {});

 private:
  const Peers peers_;
  std::map<std::tuple<Algorithm, size_t, Partial>, Schedule> made_;
};

struct AllreduceBuffer {
  void* data;    // reduced in place; the network works on it
  size_t count;  // elements
  DType dtype;
  DType wire;  // `dtype`, or 16 bits to which float32 is rounded while it travels
  Op op;       // mean is a sum here
  // Holds `data`. The network goes on using it after the operation was given up, so it is never the caller's.
  std::shared_ptr<void> memory;
  // Where not all ranks need, or give, all: the others' results are any numbers. Not with Algorithm::library.
  Partial how = {};
  // A number that is summed up beside the elements, in the same messages; or none. There is memory for it behind the
  // data. Not with Algorithm::library, nor where values are rounded, nor where not all ranks need, or give, all.
  double* rider = nullptr;
  // Whether each rank's elements are added in the order of a tree (algorithms/kernels.hpp). With Algorithm::pairwise.
  bool in_tree = false;
};

enum class Progress { none, some, done };

// Carries out one operation after the other. What it needs beside the data it keeps for the next one.
class Allreduce {
 public:
  // No other operation between these ranks uses `tag` on the channel at the same time.
  Allreduce(Channel& channel, Schedules& schedules, int tag);

  // The one before is done. With Algorithm::library, all peers begin all operations in the same order.
  void begin(Algorithm algorithm, const AllreduceBuffer& buffer);
  // Once it is done, the buffer holds the result.
  Progress advance();
  // The rank whose message is awaited.
  int waiting_for() const;

 private:
  // What MPI reads and writes.
  struct Messages {
    std::shared_ptr<void> data;
    std::shared_ptr<std::byte> received, sent;
  };

  std::byte* at(size_t element) const { return static_cast<std::byte*>(b_.data) + element * size_of(b_.dtype); }
  // Values that are rounded while they travel, as others have them: each has a place of its own. In steps that do not
  // add they are received here, too, and sent on as they are.
  std::byte* rounded(size_t element) const { return messages_->sent.get() + wire_.nbytes(element); }
  // Of elements while they travel. The rider goes wherever the last one does.
  size_t bytes_of(size_t begin, size_t end) const {
    return wire_.nbytes(end - begin) + (b_.rider != nullptr && end == b_.count ? sizeof *b_.rider : 0);
  }
  void round(const Step& step);
  void post(const Step& step);
  void take(const Step& step);
  void add_riders(size_t count, size_t mine);

  Channel& channel_;
  Schedules& schedules_;
  const int tag_;
  AllreduceBuffer b_{};
  Wire wire_;
  const Schedule* schedule_ = nullptr;
  size_t step_ = 0;
  bool posted_ = false;
  std::shared_ptr<Messages> messages_;
  size_t received_bytes_ = 0, sent_bytes_ = 0;  // that they have memory for
  std::vector<const void*> parts_;              // of a sum
  Pending pending_;
};

}  // namespace keras_hpc
