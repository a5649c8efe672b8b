// SPDX-License-Identifier: Apache-2.0
#include "transport/mpi_transport.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "common/error.hpp"
#include "common/process.hpp"
#include "common/waiting.hpp"
#include "transport/pending.hpp"

namespace keras_hpc {
namespace {

// Seconds that finding the nodes may take: all ranks are inside the same call.
constexpr double kNodesSeconds = 60;

int checked_count(size_t nbytes) {
  if (nbytes > INT_MAX) throw Error("A message of " + std::to_string(nbytes) + " bytes is too large for MPI.");
  return static_cast<int>(nbytes);
}

// A large buffer goes in parts, one after the other.
class InParts final : public Request {
 public:
  explicit InParts(std::deque<RequestPtr> parts) : parts_(std::move(parts)) {}
  bool test() override {
    while (!parts_.empty() && parts_.front()->test()) parts_.pop_front();
    return parts_.empty();
  }

 private:
  std::deque<RequestPtr> parts_;
};

class MpiChannel final : public Channel {
 public:
  explicit MpiChannel(std::unique_ptr<mpi::Communicator> comm, size_t largest_message = kLargestMessage)
      : comm_(std::move(comm)), largest_message_(largest_message) {}

  RequestPtr send(const void* data, size_t nbytes, int peer, int tag) override {
    return in_parts(nbytes, [&](size_t begin, int n) {
      return comm_->send(static_cast<const std::byte*>(data) + begin, n, peer, tag);
    });
  }
  RequestPtr receive(void* data, size_t nbytes, int peer, int tag) override {
    return in_parts(nbytes, [&](size_t begin, int n) {
      return comm_->receive(static_cast<std::byte*>(data) + begin, n, peer, tag);
    });
  }
  RequestPtr broadcast(void* data, size_t nbytes, int root) override {
    std::deque<RequestPtr> parts;
    broadcast_parts(parts, data, nbytes, root);
    return std::make_unique<InParts>(std::move(parts));
  }
  RequestPtr allgather(const void* in, void* out, const std::vector<size_t>& nbytes_by_rank) override {
    const auto rank = static_cast<size_t>(comm_->rank());
    size_t total = 0;
    for (const size_t n : nbytes_by_rank) total += n;
    if (total <= INT_MAX) {
      std::vector<int> counts(nbytes_by_rank.begin(), nbytes_by_rank.end());
      const int mine = counts[rank];
      return comm_->allgather(in, mine, out, std::move(counts));
    }
    // MPI counts are 32-bit integers: above that, every rank broadcasts its own part.
    std::deque<RequestPtr> parts;
    auto* place = static_cast<std::byte*>(out);
    for (size_t r = 0; r < nbytes_by_rank.size(); ++r) {
      if (r == rank && nbytes_by_rank[r] > 0) std::memcpy(place, in, nbytes_by_rank[r]);
      broadcast_parts(parts, place, nbytes_by_rank[r], static_cast<int>(r));
      place += nbytes_by_rank[r];
    }
    return std::make_unique<InParts>(std::move(parts));
  }
  RequestPtr barrier() override { return comm_->barrier(); }
  bool has_failed() const override { return mpi::has_failed(); }
  bool can_allreduce(DType dtype, Op op) const override { return comm_->can_allreduce(dtype, op); }
  void allreduce(void* data, size_t count, DType dtype, Op op) override {
    constexpr size_t part = size_t{1} << 28;
    for (size_t begin = 0; begin < count; begin += part)
      comm_->allreduce(static_cast<std::byte*>(data) + begin * size_of(dtype),
                       static_cast<int>(std::min(part, count - begin)), dtype, op);
  }
  RequestPtr iallreduce(void* data, size_t count, DType dtype, Op op) override {
    return comm_->iallreduce(data, checked_count(count), dtype, op);
  }

 private:
  // MPI's counts are 32-bit integers. Parts arrive in the order in which they are sent.
  template <class Begin>
  RequestPtr in_parts(size_t nbytes, Begin&& begin_part) {
    if (nbytes <= largest_message_) return begin_part(0, static_cast<int>(nbytes));
    std::deque<RequestPtr> parts;
    for (size_t begin = 0; begin < nbytes; begin += largest_message_)
      parts.push_back(begin_part(begin, static_cast<int>(std::min(largest_message_, nbytes - begin))));
    return std::make_unique<InParts>(std::move(parts));
  }
  void broadcast_parts(std::deque<RequestPtr>& parts, void* data, size_t nbytes, int root) {
    constexpr size_t part = size_t{1} << 28;
    for (size_t begin = 0; begin < nbytes; begin += part)
      parts.push_back(
          comm_->broadcast(static_cast<std::byte*>(data) + begin, checked_count(std::min(part, nbytes - begin)), root));
  }

  std::unique_ptr<mpi::Communicator> comm_;
  const size_t largest_message_;
};

// Closes a descriptor at the end of a scope.
struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

// Collective: the numbers of all ranks.
using Numbers = std::vector<int64_t>;
Numbers gather(Channel& channel, size_t ranks, const Numbers& mine, double time_limit,
               const Transport::Waiting& waiting = {}) {
  struct Message {
    Numbers mine, all;
  };
  const auto message = std::make_shared<Message>(Message{mine, Numbers(ranks * mine.size())});
  Pending pending(message);
  pending.add(channel.allgather(message->mine.data(), message->all.data(),
                                std::vector<size_t>(ranks, mine.size() * sizeof(int64_t))));
  if (waiting) waiting([&] { return pending.test(); });
  WaitedTime time;
  while (!pending.test()) {
    if (time.seconds() > time_limit)
      throw Timeout("Waited " + std::to_string(static_cast<int>(time_limit)) +
                    " s for the other ranks in making shared memory: not every rank arrived.");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return message->all;
}

class MpiTransport final : public Transport {
 public:
  MpiTransport(std::unique_ptr<mpi::Communicator> comm, Topology topology, size_t largest_message)
      : Transport(std::move(topology)), comm_(std::move(comm)), largest_message_(largest_message) {}

  bool takes_device_memory() const override { return comm_->takes_device_memory(); }
  void abandon() override { comm_->keep(); }

  std::unique_ptr<Channel> open_channel() override {
    return std::make_unique<MpiChannel>(comm_->duplicate(), largest_message_);
  }

  std::unique_ptr<Channel> open_library_channel() override {
    return std::make_unique<MpiChannel>(
        comm_->split(std::min(topology().local_rank, topology().owners), topology().node));
  }

  std::unique_ptr<Links> open_links(Channel& channel, const std::vector<int>& peers) override {
    auto links = std::make_unique<Links>();
    const Links::Place& mine = links->mine();
    const auto ranks = static_cast<size_t>(topology().size);
    const Numbers all = gather(channel, ranks, {mine.begin(), mine.end()}, time_limit());
    std::vector<Links::Place> places(ranks);
    for (size_t r = 0; r < ranks; ++r) std::copy_n(&all[r * mine.size()], mine.size(), places[r].begin());
    links->connect(topology().rank, peers, places);
    return links;
  }

  std::unique_ptr<Segment> open_segment(Channel& channel, size_t engine_bytes, size_t bytes_of_rank) override {
    // The first rank of the node makes the file; the others open it through its /proc entry. Every rank learns
    // whether it worked everywhere, so that all raise together and none waits for one that gave up. Each reserves its
    // own part, and the first one the engine's.
    const auto me = static_cast<size_t>(topology().local_rank);
    const size_t nbytes = engine_bytes + static_cast<size_t>(topology().local_size()) * bytes_of_rank;
    Descriptor file;
    std::string error;
    SharedFile offer;
    if (topology().local_rank == 0) {
      try {
        file.fd = create_shared_file(nbytes);
        offer = {static_cast<int32_t>(getpid()), file.fd};
      } catch (const Error& e) {
        error = e.what();
      }
    }
    const auto ranks = static_cast<size_t>(topology().size);
    const Numbers offers = gather(channel, ranks, {offer.pid, offer.descriptor}, time_limit(), waiting());
    std::byte* data = nullptr;
    bool reserved = false;
    if (error.empty()) {
      const auto leader = 2 * static_cast<size_t>(topology().local_ranks()[0]);
      offer = {static_cast<int32_t>(offers[leader]), static_cast<int32_t>(offers[leader + 1])};
      if (topology().local_rank != 0 && offer.descriptor >= 0) {
        file.fd = open_shared_file(offer);
        if (file.fd < 0) error = std::string("cannot open the memory of a rank on the same node: ") + strerror(errno);
      }
      try {
        if (file.fd >= 0) {
          data = static_cast<std::byte*>(map_shared_file(file.fd, nbytes));
          if (me == 0) reserve_shared_memory(file.fd, data, 0, engine_bytes);
          const size_t begin = engine_bytes + me * bytes_of_rank;
          reserve_shared_memory(file.fd, data, begin, begin + bytes_of_rank);
          reserved = true;
        }
      } catch (const Error& e) {
        error = e.what();
      }
    }
    const Numbers done = gather(channel, ranks, {reserved}, time_limit(), waiting());
    for (size_t r = 0; r < done.size(); ++r) {
      if (done[r]) continue;
      if (data != nullptr) unmap_shared_file(data, nbytes);
      throw Error("Rank " + std::to_string(r) + " could not share memory with the other ranks of its node" +
                      (error.empty() ? "." : ": " + error),
                  static_cast<int>(r));
    }
    hide_from_children(data, engine_bytes);
    reach_shared_memory(data, engine_bytes);
    return std::make_unique<Segment>(data, nbytes, [data, nbytes, depth = fork_depth()] {
      // A child has other things where its parent has the segment.
      if (fork_depth() == depth) unmap_shared_file(data, nbytes);
    });
  }

 private:
  std::unique_ptr<mpi::Communicator> comm_;
  const size_t largest_message_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(std::unique_ptr<mpi::Communicator> communicator,
                                              const std::vector<int>& node_of_rank, size_t largest_message) {
  const int rank = communicator->rank();
  return std::make_unique<MpiTransport>(std::move(communicator), Topology::make(rank, node_of_rank), largest_message);
}

std::vector<int> nodes_that_share_memory(const mpi::Communicator& communicator, const std::vector<int>& host_of_rank) {
  const auto ranks = host_of_rank.size();
  const auto me = static_cast<size_t>(communicator.rank());
  MpiChannel channel(communicator.duplicate());
  // Each rank shows a file with a number that no other one has.
  Descriptor file;
  try {
    file.fd = create_shared_file(sizeof(int64_t));
  } catch (const Error&) {  // it is alone, then; the team's memory will tell why
  }
  std::random_device random;
  const auto number = static_cast<int64_t>((static_cast<uint64_t>(random()) << 32) ^ random());
  const bool written = file.fd >= 0 && pwrite(file.fd, &number, sizeof number, 0) == sizeof number;
  const Numbers offers = gather(channel, ranks, {getpid(), written ? file.fd : -1, number}, kNodesSeconds);
  const auto can_reach = [&](size_t rank) {
    if (rank == me) return true;
    const int64_t* offer = offers.data() + 3 * rank;
    const Descriptor other{open_shared_file({static_cast<int32_t>(offer[0]), static_cast<int32_t>(offer[1])})};
    int64_t seen = 0;
    return other.fd >= 0 && pread(other.fd, &seen, sizeof seen, 0) == sizeof seen && seen == offer[2];
  };
  // The first rank of each host gathers those that can open its file, then the first one that is left, and so on.
  std::vector<int> node_of_rank(ranks, -1);
  while (std::count(node_of_rank.begin(), node_of_rank.end(), -1) > 0) {
    std::map<int, size_t> first;  // of each host
    for (size_t r = ranks; r-- > 0;)
      if (node_of_rank[r] < 0) first[host_of_rank[r]] = r;
    const bool joins = node_of_rank[me] < 0 && can_reach(first[host_of_rank[me]]);
    const Numbers joined = gather(channel, ranks, {joins}, kNodesSeconds);
    for (size_t r = 0; r < ranks; ++r)
      if (joined[r]) node_of_rank[r] = static_cast<int>(first[host_of_rank[r]]);
  }
  // By number, in order of their first ranks.
  std::map<int, int> number_of;
  for (int& node : node_of_rank) node = number_of.emplace(node, static_cast<int>(number_of.size())).first->second;
  return node_of_rank;
}

}  // namespace keras_hpc
