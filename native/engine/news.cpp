// SPDX-License-Identifier: Apache-2.0
#include "engine/news.hpp"

#include <algorithm>
#include <utility>

#include "common/index.hpp"
#include "common/waiting.hpp"

namespace keras_hpc {
namespace {

constexpr int kTag = 1;
// A small message has left by then, also over a connection that is made for it.
constexpr double kSendSeconds = 0.02;

// The rank of a node that a rank of another one tells.
int listener(const std::vector<int>& node, size_t local_rank) {
  return node[local_rank % node.size()];
}

// Calls `use` with the ranks of each node that is 1, 2, 4, ... after this one, or, with -1, before it.
template <class Use>
void for_nodes(const Topology& topology, int direction, Use&& use) {
  for (int distance = 1; distance < topology.node_count; distance *= 2) {
    const int node = (topology.node + direction * distance + topology.node_count) % topology.node_count;
    use(topology.ranks_of_node[at(node)]);
  }
}

}  // namespace

std::string News::Item::text(int rank) const {
  const std::string name = "rank " + std::to_string(culprit);
  if (why == Why::ended) return "the process of " + name + " has ended.";
  if (why == Why::lost) return "MPI has lost the connection to " + name + ".";
  if (messenger == culprit) return name + " met an error, which it tells of itself.";
  return "rank " + std::to_string(messenger) + " has given up waiting for " +
         (culprit == rank ? "this rank." : name + ".");
}

News::News(std::unique_ptr<Channel> channel, std::unique_ptr<Datagrams> datagrams, const Topology& topology)
    : topology_(topology), channel_(std::move(channel)), datagrams_(std::move(datagrams)) {
  for_nodes(topology, -1, [&](const std::vector<int>& node) {
    for (size_t local = 0; local < node.size(); ++local) {
      if (listener(topology.local_ranks(), local) != topology.rank) continue;
      Receive& receive = receives_.emplace_back(node[local]);
      receive.pending.add(channel_->receive(receive.item.get(), sizeof(Item), receive.rank, kTag), receive.rank);
    }
  });
}

void News::tell(Item item) {
  const std::lock_guard lock(mutex_);
  if (channel_ == nullptr || has_told_) return;
  has_told_ = true;
  listen();  // MPI may know more by now
  const auto message = std::make_shared<Item>(heard_.value_or(item));
  if (datagrams_) {
    for_nodes(topology_, 1, [&](const std::vector<int>& node) {
      const int first = listener(node, at(topology_.local_rank));
      // The culprit may be gone; if it is not, it shall know, too.
      const int second = first == message->culprit ? listener(node, at(topology_.local_rank) + 1) : first;
      datagrams_->send(first, message.get(), sizeof *message);
      datagrams_->send(second, message.get(), sizeof *message);  // the same again, as one may get lost
    });
    if (message->why != Why::failed || channel_->has_failed()) return;
  }
  Pending pending(message);
  for_nodes(topology_, 1, [&](const std::vector<int>& node) {
    const int peer = listener(node, at(topology_.local_rank));
    // That a rank has ended is known on its own node only: another one knows that it was given up.
    if (datagrams_ && peer == message->culprit) return;
    pending.add(channel_->send(message.get(), sizeof *message, peer, kTag), peer);
  });
  for (const auto begin = Clock::now(); !pending.test() && seconds_since(begin) < kSendSeconds;) yield();
}

std::optional<News::Item> News::hear() {
  const std::lock_guard lock(mutex_);
  listen();
  return heard_;
}

void News::listen() {
  Item item{};
  // Those come first that say more than that MPI has lost somebody.
  if (!heard_ && channel_ != nullptr && datagrams_ && datagrams_->receive(&item, sizeof item)) heard_ = item;
  for (Receive& receive : receives_)
    if (!heard_ && has_come(receive)) heard_ = *receive.item;
}

bool News::has_come(Receive& receive) const {
  try {
    return receive.pending.test();
  } catch (const Error&) {
    *receive.item = {topology_.rank, receive.rank, Why::lost};
    return true;
  }
}

void News::stop() {
  const std::lock_guard lock(mutex_);
  for (Receive& receive : receives_) receive.pending.cancel();
  receives_.clear();
  channel_.reset();
}

}  // namespace keras_hpc
