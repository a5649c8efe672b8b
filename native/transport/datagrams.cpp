// SPDX-License-Identifier: Apache-2.0
#include "transport/datagrams.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "common/index.hpp"

namespace keras_hpc {
namespace {

// This host's, as 32-bit numbers in network order; the loopback's only where there is no other.
std::vector<uint32_t> addresses() {
  std::vector<uint32_t> others, loopback;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return others;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET || !(one->ifa_flags & IFF_UP)) continue;
    sockaddr_in address{};
    std::memcpy(&address, one->ifa_addr, sizeof address);
    (one->ifa_flags & IFF_LOOPBACK ? loopback : others).push_back(address.sin_addr.s_addr);
  }
  freeifaddrs(all);
  return others.empty() ? loopback : others;
}

}  // namespace

Datagrams::Datagrams() {
  socket_ = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  socklen_t length = sizeof any;
  auto* address = reinterpret_cast<sockaddr*>(&any);
  if (socket_ < 0 || bind(socket_, address, length) != 0 || getsockname(socket_, address, &length) != 0) return;
  std::random_device random;
  mine_[0] = static_cast<int64_t>((static_cast<uint64_t>(random()) << 32) ^ random());
  mine_[1] = ntohs(any.sin_port);
  const std::vector<uint32_t> found = addresses();
  for (size_t i = 0; i < found.size() && i < kAddresses; ++i) mine_[2 + i] = found[i];
}

Datagrams::~Datagrams() {
  if (socket_ >= 0) close(socket_);
}

void Datagrams::send(int rank, const void* data, size_t nbytes) const {
  const Place& place = places_[at(rank)];
  if (socket_ < 0 || place[1] == 0 || nbytes > kMost) return;
  std::byte message[sizeof(int64_t) + kMost];
  std::memcpy(message, place.data(), sizeof(int64_t));
  std::memcpy(message + sizeof(int64_t), data, nbytes);
  for (size_t i = 2; i < kNumbers && place[i] != 0; ++i) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(place[1]));
    to.sin_addr.s_addr = static_cast<uint32_t>(place[i]);
    // One that cannot be reached there may be by another of its addresses.
    [[maybe_unused]] const auto sent =
        sendto(socket_, message, sizeof(int64_t) + nbytes, 0, reinterpret_cast<const sockaddr*>(&to), sizeof to);
  }
}

bool Datagrams::receive(void* data, size_t nbytes) const {
  std::byte message[sizeof(int64_t) + kMost + 1];
  for (;;) {
    const ssize_t got = socket_ < 0 ? -1 : recv(socket_, message, sizeof message, 0);
    if (got < 0 && (socket_ < 0 || errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    // Strangers may write here, too; and an error is of something that was sent before.
    if (got != static_cast<ssize_t>(sizeof(int64_t) + nbytes)) continue;
    if (std::memcmp(message, mine_.data(), sizeof(int64_t)) != 0) continue;
    std::memcpy(data, message + sizeof(int64_t), nbytes);
    return true;
  }
}

}  // namespace keras_hpc
