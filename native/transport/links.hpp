// SPDX-License-Identifier: Apache-2.0
// Connections between ranks beside MPI, for small messages, by TCP over IPv4. MPI is not to be used once it has lost a
// rank, and may end a process that does (see engine/news.hpp). The kernel closes them when a process ends, however it
// does: so they also tell of a rank that was killed, and whose node has no other rank.
//
// Nothing here waits. Connections are made while ranks look, and one that cannot be made, as where a firewall is
// between two hosts, is missing. They count once both sides have shown the token of the one that accepts, as another
// process may have its port on another host.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "common/process.hpp"
#include "common/waiting.hpp"

namespace keras_hpc {

class Links {
 public:
  static constexpr size_t kAddresses = 4;
  static constexpr size_t kNumbers = 2 + kAddresses;
  using Place = std::array<int64_t, kNumbers>;  // where a rank is reached: token, port, addresses; port 0: nowhere
  static constexpr size_t kMost = 32;           // bytes of a message

  Links();
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  const Place& mine() const { return mine_; }
  // Connects to ranks from now on. Others may connect to this one.
  void connect(int rank, const std::vector<int>& peers, const std::vector<Place>& places);
  // Sends to a rank that is connected, whoever has made the connection; else nothing is sent.
  void send(int rank, const void* data, size_t nbytes);
  // Makes connections, and reads what has come.
  void look();
  // How many are made.
  size_t count() const;
  // Whether there was a message, of `nbytes`.
  bool receive(void* data, size_t nbytes);
  // A rank that was connected, and whose process has ended without leave.
  std::optional<int> lost() const;
  // What ends from now on has not been lost, here and at the others. Nothing in a forked child, which has the same
  // connections.
  void leave();

 private:
  enum class Kind : int32_t { hello, welcome, message, leave };
  struct Record {
    int64_t token;  // of the one that accepts
    int32_t rank;   // that sends
    Kind kind;
    std::byte data[kMost];
  };
  struct Link {
    int rank = -1;  // unknown: whoever connects has not said
    bool accepts = false;
    bool is_made = false, has_left = false, was_lost = false;
    int socket = -1;
    size_t next_address = 0;
    Place place{};
    Clock::time_point began = Clock::now();
    std::array<std::byte, sizeof(Record)> read{};
    size_t count = 0;  // of bytes read of the next record
  };
  void accept_others();
  void connect(Link& link) const;
  void read(Link& link);
  void handle(Link& link, const Record& record);
  void write(const Link& link, Kind kind, const void* data = nullptr, size_t nbytes = 0) const;
  void drop(Link& link) const;

  int listens_ = -1;
  int rank_ = -1;
  bool has_left_ = false;
  const int depth_ = fork_depth();
  Place mine_{};
  std::list<Link> links_;
  std::list<std::array<std::byte, kMost>> messages_;
};

}  // namespace keras_hpc
