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
constexpr double kMakeSeconds = 0.5;
// A process that ends without leave may have done all its work, as others are about to.
constexpr double kGraceSeconds = 1;

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

std::vector<int> News::told_by(const Topology& topology) {
  std::vector<int> ranks;
  for_nodes(topology, 1,
            [&](const std::vector<int>& node) { ranks.push_back(listener(node, at(topology.local_rank))); });
  return ranks;
}

News::News(std::unique_ptr<Channel> channel, std::unique_ptr<Links> links, const Topology& topology)
    : topology_(topology), channel_(std::move(channel)), links_(std::move(links)) {
  for_nodes(topology, -1, [&](const std::vector<int>& node) {
    for (size_t local = 0; local < node.size(); ++local) {
      if (listener(topology.local_ranks(), local) != topology.rank) continue;
      Receive& receive = receives_.emplace_back(node[local]);
      receive.pending.add(channel_->receive(receive.item.get(), sizeof(Item), receive.rank, kTag), receive.rank);
    }
  });
  // All ranks are here, so this takes a moment. What cannot be made at once may be later, or never.
  const size_t all = told_by(topology).size() + receives_.size();
  for (const auto begin = Clock::now(); links_ && links_->count() < all && seconds_since(begin) < kMakeSeconds; yield())
    links_->look();
}

void News::tell(Item item) {
  const std::lock_guard lock(mutex_);
  if (channel_ == nullptr || has_told_) return;
  has_told_ = true;
  listen();  // others may know more by now
  const auto message = std::make_shared<Item>(heard_.value_or(item));
  const std::vector<int> peers = told_by(topology_);
  if (links_) {
    for (const int peer : peers) links_->send(peer, message.get(), sizeof *message);
    if (message->why != Why::failed || channel_->has_failed()) return;
  }
  Pending pending(message);
  for (const int peer : peers) {
    // That a rank has ended is known on its own node only: another one knows that it was given up.
    if (links_ && peer == message->culprit) continue;
    pending.add(channel_->send(message.get(), sizeof *message, peer, kTag), peer);
  }
  for (const auto begin = Clock::now(); !pending.test() && seconds_since(begin) < kSendSeconds;) yield();
}

std::optional<News::Item> News::hear() {
  const std::lock_guard lock(mutex_);
  listen();
  return heard_;
}

void News::listen() {
  if (heard_ || channel_ == nullptr) return;
  if (links_) {
    links_->look();
    Item item{};
    // Those come first that say more than that MPI has lost somebody.
    if (links_->receive(&item, sizeof item)) heard_ = item;
    const std::optional<int> lost = links_->lost();
    if (lost) lost_at_ = std::min(lost_at_, Clock::now());
    if (!heard_ && lost && seconds_since(lost_at_) > kGraceSeconds) heard_ = {topology_.rank, *lost, Why::ended};
  }
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

void News::leave() {
  const std::lock_guard lock(mutex_);
  if (links_) links_->leave();
}

void News::stop() {
  const std::lock_guard lock(mutex_);
  links_.reset();
  for (Receive& receive : receives_) receive.pending.cancel();
  receives_.clear();
  channel_.reset();
}

}  // namespace keras_hpc
