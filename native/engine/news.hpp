// SPDX-License-Identifier: Apache-2.0
// What nodes tell each other of a team that cannot go on: bells reach a rank's own node only.
//
// A rank that has failed sends one small message to a rank of each of the nodes that are 1, 2, 4, ... further on. Who
// hears of it passes it on, and then fails, too: so all nodes know after few messages, however many there are, and each
// rank has only few receives waiting. They wait on a channel of their own, and nothing is sent while all is well.
//
// A message of MPI to a process that has ended, or after any error of MPI, can crash the sender before its own error
// was seen (MPICH over UCX, with TCP). So there are connections of TCP, too, between the same ranks, and then nothing
// goes by MPI. They also end when a process does: whoever is alone on its node has no neighbour to tell of it.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "transport/pending.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

class News {
 public:
  enum class Why : int32_t { failed, ended, lost };  // lost: MPI says so
  struct Item {
    int32_t messenger;                 // who was the first to tell
    int32_t culprit;                   // whom it waited for, or heard of; or the same
    Why why;                           // what became of that one
    std::string text(int rank) const;  // for this rank
  };

  // The ranks that a rank tells.
  static std::vector<int> told_by(const Topology& topology);

  // Collective. `links`: to those, or null.
  News(std::unique_ptr<Channel> channel, std::unique_ptr<Links> links, const Topology& topology);

  // All of these from any thread.
  // Tells others, once: what was heard first, or else this.
  void tell(Item item);
  // What another node has told, once it has.
  std::optional<Item> hear();
  // This rank has no more work: that its process ends is no news.
  void leave();
  // Nothing is heard from now on.
  void stop();

 private:
  struct Receive {
    explicit Receive(int from) : rank(from) {}
    int rank;
    std::shared_ptr<Item> item = std::make_shared<Item>();
    Pending pending{item};
  };
  bool has_come(Receive& receive) const;
  void listen();

  const Topology& topology_;
  std::mutex mutex_;
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<Links> links_;  // null: the channel is enough
  std::deque<Receive> receives_;
  std::optional<Item> heard_;
  Clock::time_point lost_at_ = Clock::time_point::max();
  bool has_told_ = false;
};

}  // namespace keras_hpc
