// SPDX-License-Identifier: Apache-2.0
#include "transport/mpi_transport.hpp"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <deque>

#include "common/error.hpp"

namespace keras_hpc {
namespace {

// Seconds that making a segment may take: all ranks are inside the same call.
constexpr double kSegmentTimeout = 60;

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
  explicit MpiChannel(std::unique_ptr<mpi::Communicator> comm) : comm_(std::move(comm)) {}

  RequestPtr send(const void* data, size_t nbytes, int peer, int tag) override {
    return comm_->send(data, checked_count(nbytes), peer, tag);
  }
  RequestPtr receive(void* data, size_t nbytes, int peer, int tag) override {
    return comm_->receive(data, checked_count(nbytes), peer, tag);
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
  void broadcast_parts(std::deque<RequestPtr>& parts, void* data, size_t nbytes, int root) {
    constexpr size_t part = size_t{1} << 28;
    for (size_t begin = 0; begin < nbytes; begin += part)
      parts.push_back(
          comm_->broadcast(static_cast<std::byte*>(data) + begin, checked_count(std::min(part, nbytes - begin)), root));
  }

  std::unique_ptr<mpi::Communicator> comm_;
};

// Closes a descriptor at the end of a scope.
struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

class MpiTransport final : public Transport {
 public:
  MpiTransport(std::unique_ptr<mpi::Communicator> comm, Topology topology)
      : Transport(std::move(topology)), comm_(std::move(comm)) {}

  std::unique_ptr<Channel> open_channel() override { return std::make_unique<MpiChannel>(comm_->duplicate()); }

  std::unique_ptr<Segment> open_segment(Channel& channel, size_t nbytes) override {
    // The first rank of the node makes the file; the others open it through its /proc entry. Every rank learns
    // whether it worked everywhere, so that all raise together and none waits for one that gave up.
    Descriptor file;
    std::string error;
    int offer[2] = {-1, -1};
    if (topology().local_rank == 0) {
      try {
        file.fd = create_shared_file(nbytes);
        offer[0] = getpid();
        offer[1] = file.fd;
      } catch (const Error& e) {
        error = e.what();
      }
    }
    std::vector<int> offers = exchange(channel, offer[0], offer[1]);
    void* data = nullptr;
    if (error.empty()) {
      const auto leader = 2 * static_cast<size_t>(topology().local_ranks()[0]);
      if (topology().local_rank != 0 && offers[leader] >= 0) {
        file.fd = open_shared_file(offers[leader], offers[leader + 1]);
        if (file.fd < 0) error = std::string("cannot open the memory of a rank on the same node: ") + strerror(errno);
      }
      try {
        if (file.fd >= 0) data = map_shared_file(file.fd, nbytes);
      } catch (const Error& e) {
        error = e.what();
      }
    }
    const std::vector<int> mapped = exchange(channel, data != nullptr, 0);
    for (size_t r = 0; r < mapped.size(); r += 2) {
      if (mapped[r]) continue;
      if (data != nullptr) unmap_shared_file(data, nbytes);
      throw Error("Rank " + std::to_string(r / 2) + " could not share memory with the other ranks of its node" +
                  (error.empty() ? "." : ": " + error));
    }
    return std::make_unique<Segment>(data, nbytes, [data, nbytes] { unmap_shared_file(data, nbytes); });
  }

 private:
  std::vector<int> exchange(Channel& channel, int a, int b) const {
    const int mine[2] = {a, b};
    const auto size = static_cast<size_t>(topology().size);
    std::vector<int> all(2 * size);
    finish(channel.allgather(mine, all.data(), std::vector<size_t>(size, sizeof mine)), kSegmentTimeout,
           "making shared memory");
    return all;
  }

  std::unique_ptr<mpi::Communicator> comm_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(std::unique_ptr<mpi::Communicator> communicator,
                                              const std::vector<int>& node_of_rank) {
  const int rank = communicator->rank();
  return std::make_unique<MpiTransport>(std::move(communicator), Topology::make(rank, node_of_rank));
}

}  // namespace keras_hpc
