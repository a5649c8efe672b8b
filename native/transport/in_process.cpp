// SPDX-License-Identifier: Apache-2.0
#include "transport/in_process.hpp"

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>

#include "common/error.hpp"

namespace keras_hpc {
namespace {

using Message = std::vector<std::byte>;

// What the threads share: mailboxes, and the segments of each node.
struct World {
  std::mutex mutex;
  // (channel, from, to, tag) -> messages in the order they were sent
  std::map<std::tuple<int, int, int, int>, std::deque<Message>> mailboxes;
  // (node, number of the segment) -> memory
  std::map<std::pair<int, int>, std::shared_ptr<void>> segments;
};

struct Done final : Request {
  bool test() override { return true; }
};

struct Receive final : Request {
  std::shared_ptr<World> world;
  std::tuple<int, int, int, int> box;
  void* data;
  size_t nbytes;
  Receive(std::shared_ptr<World> w, std::tuple<int, int, int, int> b, void* d, size_t n)
      : world(std::move(w)), box(b), data(d), nbytes(n) {}
  bool test() override {
    Message message;
    {
      const std::lock_guard lock(world->mutex);
      const auto found = world->mailboxes.find(box);
      if (found == world->mailboxes.end()) return false;
      message = std::move(found->second.front());
      found->second.pop_front();
      if (found->second.empty()) world->mailboxes.erase(found);
    }
    if (message.size() > nbytes)
      throw Error("A message of " + std::to_string(message.size()) + " bytes arrived where at most " +
                  std::to_string(nbytes) + " bytes were expected.");
    if (!message.empty()) std::memcpy(data, message.data(), message.size());
    return true;
  }
};

struct All final : Request {
  std::vector<RequestPtr> requests;
  bool test() override {
    while (!requests.empty() && requests.back()->test()) requests.pop_back();
    return requests.empty();
  }
};

class InProcessChannel final : public Channel {
 public:
  InProcessChannel(std::shared_ptr<World> world, int number, int rank, int size)
      : world_(std::move(world)), number_(number), rank_(rank), size_(size) {}

  RequestPtr send(const void* data, size_t nbytes, int peer, int tag) override {
    const auto* bytes = static_cast<const std::byte*>(data);
    const std::lock_guard lock(world_->mutex);
    world_->mailboxes[{number_, rank_, peer, tag}].emplace_back(bytes, bytes + nbytes);
    return std::make_unique<Done>();
  }

  RequestPtr receive(void* data, size_t nbytes, int peer, int tag) override {
    return std::make_unique<Receive>(world_, std::tuple(number_, peer, rank_, tag), data, nbytes);
  }

  RequestPtr broadcast(void* data, size_t nbytes, int root) override {
    const int tag = next_collective();
    if (rank_ != root) return receive(data, nbytes, root, tag);
    for (int peer = 0; peer < size_; ++peer)
      if (peer != root) send(data, nbytes, peer, tag);
    return std::make_unique<Done>();
  }

  RequestPtr allgather(const void* in, void* out, const std::vector<size_t>& nbytes_by_rank) override {
    const int tag = next_collective();
    auto all = std::make_unique<All>();
    auto* place = static_cast<std::byte*>(out);
    for (int peer = 0; peer < size_; ++peer) {
      send(in, nbytes_by_rank[static_cast<size_t>(rank_)], peer, tag);
      all->requests.push_back(receive(place, nbytes_by_rank[static_cast<size_t>(peer)], peer, tag));
      place += nbytes_by_rank[static_cast<size_t>(peer)];
    }
    return all;
  }

  RequestPtr barrier() override {
    return allgather(nullptr, nullptr, std::vector<size_t>(static_cast<size_t>(size_), 0));
  }

 private:
  int next_collective() { return --collectives_; }  // negative: never a tag of point-to-point messages

  std::shared_ptr<World> world_;
  int number_;
  int rank_;
  int size_;
  int collectives_ = 0;
};

class InProcessTransport final : public Transport {
 public:
  InProcessTransport(std::shared_ptr<World> world, Topology topology)
      : Transport(std::move(topology)), world_(std::move(world)) {}

  std::unique_ptr<Channel> open_channel() override {
    return std::make_unique<InProcessChannel>(world_, channels_++, topology().rank, topology().size);
  }

  std::unique_ptr<Segment> open_segment(Channel&, size_t engine_bytes, size_t bytes_of_rank) override {
    const size_t nbytes = engine_bytes + static_cast<size_t>(topology().local_size()) * bytes_of_rank;
    const std::lock_guard lock(world_->mutex);
    std::shared_ptr<void>& memory = world_->segments[{topology().node, segments_++}];
    if (!memory) {
      constexpr std::align_val_t page{4096};
      memory = std::shared_ptr<void>(::operator new(nbytes, page), [](void* p) { ::operator delete(p, page); });
      std::memset(memory.get(), 0, nbytes);
    }
    return std::make_unique<Segment>(memory.get(), nbytes, [keep = memory] {});
  }

 private:
  std::shared_ptr<World> world_;
  int channels_ = 0;
  int segments_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_in_process_transports(const std::vector<int>& node_of_rank) {
  const auto world = std::make_shared<World>();
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < static_cast<int>(node_of_rank.size()); ++rank)
    transports.push_back(std::make_unique<InProcessTransport>(world, Topology::make(rank, node_of_rank)));
  return transports;
}

}  // namespace keras_hpc
