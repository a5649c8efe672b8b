// SPDX-License-Identifier: Apache-2.0
// A way between ranks beside MPI, for small messages that may get lost: UDP over IPv4. MPI is not to be used once it
// has lost a rank, and may end a process that does (see engine/news.hpp).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace keras_hpc {

class Datagrams {
 public:
  // Where a rank is reached; a datagram is for it only if it begins with the token.
  static constexpr size_t kAddresses = 4;
  static constexpr size_t kNumbers = 2 + kAddresses;
  using Place = std::array<int64_t, kNumbers>;  // token, port, addresses; port 0: it cannot be reached
  static constexpr size_t kMost = 64;           // bytes of a message

  Datagrams();
  ~Datagrams();
  Datagrams(const Datagrams&) = delete;
  Datagrams& operator=(const Datagrams&) = delete;

  const Place& mine() const { return mine_; }
  void set_places(std::vector<Place> of_rank) { places_ = std::move(of_rank); }
  // Neither blocks, nor says whether it arrives.
  void send(int rank, const void* data, size_t nbytes) const;
  // Whether a message of this length was there.
  bool receive(void* data, size_t nbytes) const;

 private:
  int socket_ = -1;
  Place mine_{};
  std::vector<Place> places_;
};

}  // namespace keras_hpc
