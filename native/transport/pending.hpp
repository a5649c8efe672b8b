// SPDX-License-Identifier: Apache-2.0
// Operations of the network that are under way. MPI goes on reading and writing their memory when whoever has begun
// them gives up: so neither may end before the other, and the memory is never the caller's.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "transport/transport.hpp"

namespace keras_hpc {

class Pending {
 public:
  // `memory` holds what the operations read and write.
  explicit Pending(std::shared_ptr<void> memory = nullptr) : memory_(std::move(memory)) {}
  // What is not finished yet is kept, with its memory, until it is: for the life of the process if need be.
  ~Pending();
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  void add(RequestPtr request, int peer = -1) { requests_.emplace_back(peer, std::move(request)); }
  // Whether all have finished.
  bool test() {
    while (!requests_.empty() && requests_.back().second->test()) requests_.pop_back();
    return requests_.empty();
  }
  // Ends receives of which nothing has come yet.
  void cancel();
  // Frees what was kept and has finished since. While the network is there.
  static void free_finished();
  // The rank whose message is awaited; -1: none, or one of many.
  int peer() const { return requests_.empty() ? -1 : requests_.back().first; }

 private:
  std::vector<std::pair<int, RequestPtr>> requests_;
  std::shared_ptr<void> memory_;
};

// Memory for messages, not touched yet.
inline std::shared_ptr<std::byte> message_memory(size_t nbytes) {
  return {new std::byte[nbytes], std::default_delete<std::byte[]>()};
}

}  // namespace keras_hpc
