// SPDX-License-Identifier: Apache-2.0
#include "transport/in_process.hpp"

#include <algorithm>
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

struct Posted {
  void* data;
  size_t nbytes;
  bool arrived = false;
};

// What was sent and not received, and who waits.
struct Mailbox {
  std::deque<Message> messages;
  std::deque<Posted*> posted;  // in the order in which they take messages, as MPI's receives do

  void deliver(CopyFunction copy) {
    while (!messages.empty() && !posted.empty()) {
      const Message message = std::move(messages.front());
      Posted& receive = *posted.front();
      messages.pop_front();
      posted.pop_front();
      if (message.size() > receive.nbytes)
        throw Error("A message of " + std::to_string(message.size()) + " bytes arrived where at most " +
                    std::to_string(receive.nbytes) + " bytes were expected.");
      if (!message.empty()) copy(receive.data, message.data(), message.size());
      receive.arrived = true;
    }
  }
};

void copy_on_host(void* to, const void* from, size_t nbytes) {
  std::memcpy(to, from, nbytes);
}

// What the threads share: mailboxes, and the segments of each node.
struct World {
  explicit World(CopyFunction given) : copies_any(given != nullptr), copy(copies_any ? given : copy_on_host) {}

  const bool copies_any;  // also memory of GPUs
  const CopyFunction copy;
  std::mutex mutex;
  // (channel, from, to, tag)
  std::map<std::tuple<int, int, int, int>, Mailbox> mailboxes;
  // (node, number of the segment) -> memory
  std::map<std::pair<int, int>, std::shared_ptr<void>> segments;
};

struct Done final : Request {
  bool test() override { return true; }
};

// The receiver's thread takes its messages: only it writes into its memory.
struct Receive final : Request {
  std::shared_ptr<World> world;
  std::tuple<int, int, int, int> box;
  Posted posted;
  Receive(std::shared_ptr<World> w, std::tuple<int, int, int, int> b, void* data, size_t nbytes)
      : world(std::move(w)), box(b), posted{data, nbytes} {
    const std::lock_guard lock(world->mutex);
    world->mailboxes[box].posted.push_back(&posted);
  }
  ~Receive() override {
    const std::lock_guard lock(world->mutex);
    if (posted.arrived) return;
    auto& waiting = world->mailboxes[box].posted;
    waiting.erase(std::remove(waiting.begin(), waiting.end(), &posted), waiting.end());
  }
  bool cancel() override { return true; }  // its end takes it out
  bool test() override {
    const std::lock_guard lock(world->mutex);
    if (posted.arrived) return true;
    Mailbox& mailbox = world->mailboxes[box];
    mailbox.deliver(world->copy);
    if (mailbox.messages.empty() && mailbox.posted.empty()) world->mailboxes.erase(box);
    return posted.arrived;
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
    Message message(nbytes);
    if (nbytes > 0) world_->copy(message.data(), data, nbytes);
    const std::lock_guard lock(world_->mutex);
    world_->mailboxes[{number_, rank_, peer, tag}].messages.push_back(std::move(message));
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

  bool takes_device_memory() const override { return world_->copies_any; }

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

std::vector<std::unique_ptr<Transport>> make_in_process_transports(const std::vector<int>& node_of_rank,
                                                                   CopyFunction copy) {
  const auto world = std::make_shared<World>(copy);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < static_cast<int>(node_of_rank.size()); ++rank)
    transports.push_back(std::make_unique<InProcessTransport>(world, Topology::make(rank, node_of_rank)));
  return transports;
}

}  // namespace keras_hpc
