// SPDX-License-Identifier: Apache-2.0
#include "transport/links.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <random>
#include <set>

namespace keras_hpc {
namespace {

constexpr int kWaiting = 128;          // connections that the kernel makes before they are accepted
constexpr double kAnswerSeconds = 10;  // then another address is tried

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

// Those of all links. A child that a rank forks, as one that reads data, would keep them open when the rank has ended.
struct Sockets {
  std::mutex mutex;
  std::set<int> open;
};
Sockets& sockets() {
  static auto* all = [] {
    pthread_atfork([] { sockets().mutex.lock(); }, [] { sockets().mutex.unlock(); },
                   [] {
                     for (const int one : sockets().open) close(one);
                     sockets().open.clear();
                     sockets().mutex.unlock();
                   });
    return new Sockets;  // for as long as there may be forks
  }();
  return *all;
}

template <class Open>
int opened(Open&& open) {
  const std::lock_guard lock(sockets().mutex);
  const int one = open();
  if (one >= 0) sockets().open.insert(one);
  return one;
}

int open_socket() {
  return opened([] { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

// Nothing in a forked child, where the number may be another file's.
void close_socket(int one) {
  const std::lock_guard lock(sockets().mutex);
  if (sockets().open.erase(one) > 0) close(one);
}

}  // namespace

Links::Links() {
  listens_ = open_socket();
  sockaddr_in any{};
  any.sin_family = AF_INET;
  socklen_t length = sizeof any;
  auto* address = reinterpret_cast<sockaddr*>(&any);
  if (listens_ < 0 || bind(listens_, address, length) != 0 || listen(listens_, kWaiting) != 0 ||
      getsockname(listens_, address, &length) != 0)
    return;
  std::random_device random;
  mine_[0] = static_cast<int64_t>((static_cast<uint64_t>(random()) << 32) ^ random());
  mine_[1] = ntohs(any.sin_port);
  const std::vector<uint32_t> found = addresses();
  std::copy_n(found.begin(), std::min(found.size(), kAddresses), mine_.begin() + 2);
}

Links::~Links() {
  leave();
  for (Link& link : links_) drop(link);
  close_socket(listens_);
}

void Links::connect(int rank, const std::vector<int>& peers, const std::vector<Place>& places) {
  rank_ = rank;
  for (const int peer : peers) {
    Link& link = links_.emplace_back();
    link.rank = peer;
    link.place = places[static_cast<size_t>(peer)];
    connect(link);
  }
}

// Begins with the next address, if there is one.
void Links::connect(Link& link) const {
  drop(link);
  while (link.place[1] != 0 && link.next_address < kAddresses && link.place[2 + link.next_address] != 0) {
    link.began = Clock::now();
    link.socket = open_socket();
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(link.place[1]));
    to.sin_addr.s_addr = static_cast<uint32_t>(link.place[2 + link.next_address++]);
    if (link.socket < 0) return;
    if (::connect(link.socket, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0 || errno == EINPROGRESS) return;
    drop(link);
  }
}

void Links::drop(Link& link) const {
  close_socket(link.socket);
  link.socket = -1;
  link.count = 0;
  link.is_made = false;
}

void Links::accept_others() {
  for (;;) {
    const int one = opened([this] { return accept4(listens_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
    if (one < 0) return;
    Link& link = links_.emplace_back();
    link.accepts = true;
    link.socket = one;
    link.place = mine_;
  }
}

void Links::look() {
  accept_others();
  for (Link& link : links_) {
    if (link.socket < 0) continue;
    pollfd ready{link.socket, static_cast<short>(link.accepts || link.is_made ? POLLIN : POLLIN | POLLOUT), 0};
    const bool is_late = !link.is_made && seconds_since(link.began) > kAnswerSeconds;
    if (poll(&ready, 1, 0) == 1 && !(ready.revents & (POLLERR | POLLNVAL))) {
      if (!link.accepts && !link.is_made) write(link, Kind::hello);
      if (ready.revents & (POLLIN | POLLHUP)) read(link);
    } else if (ready.revents != 0 && link.is_made) {
      drop(link);  // the connection broke: nobody knows why
    } else if (ready.revents != 0 || is_late) {
      link.accepts ? drop(link) : connect(link);
    }
  }
  links_.remove_if([](const Link& link) { return link.accepts && link.socket < 0 && !link.was_lost; });
}

void Links::read(Link& link) {
  while (link.socket >= 0) {
    const ssize_t got = recv(link.socket, link.read.data() + link.count, link.read.size() - link.count, 0);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {  // only an orderly end is that of a process
      link.was_lost = got == 0 && link.is_made && !link.has_left;
      const bool again = !link.is_made && !link.accepts;
      drop(link);
      if (again) connect(link);
      return;
    }
    link.count += static_cast<size_t>(got);
    if (link.count < sizeof(Record)) continue;
    link.count = 0;
    Record record{};
    std::memcpy(&record, link.read.data(), sizeof record);
    handle(link, record);
  }
}

void Links::handle(Link& link, const Record& record) {
  if (record.token != link.place[0]) return drop(link);  // a stranger
  if (record.kind == Kind::hello && link.accepts && !link.is_made) {
    link.rank = record.rank;
    link.is_made = true;
    write(link, Kind::welcome);
  } else if (record.kind == Kind::welcome && !link.accepts && record.rank == link.rank) {
    link.is_made = true;
  } else if (record.kind == Kind::message && link.is_made) {
    std::memcpy(messages_.emplace_back().data(), record.data, kMost);
  } else if (record.kind == Kind::leave) {
    link.has_left = true;
  }
}

void Links::write(const Link& link, Kind kind, const void* data, size_t nbytes) const {
  Record record{link.place[0], rank_, kind, {}};
  if (nbytes > 0) std::memcpy(record.data, data, std::min(nbytes, kMost));
  // So little always goes at once, or the connection is broken.
  [[maybe_unused]] const auto sent = ::send(link.socket, &record, sizeof record, MSG_NOSIGNAL);
}

void Links::send(int rank, const void* data, size_t nbytes) {
  for (const Link& link : links_)
    if (link.rank == rank && link.is_made) return write(link, Kind::message, data, nbytes);
}

bool Links::receive(void* data, size_t nbytes) {
  if (messages_.empty()) return false;
  std::memcpy(data, messages_.front().data(), std::min(nbytes, kMost));
  messages_.pop_front();
  return true;
}

size_t Links::count() const {
  return static_cast<size_t>(
      std::count_if(links_.begin(), links_.end(), [](const Link& link) { return link.is_made; }));
}

std::optional<int> Links::lost() const {
  for (const Link& link : links_)
    if (link.was_lost) return link.rank;
  return {};
}

void Links::leave() {
  if (has_left_ || depth_ != fork_depth()) return;
  has_left_ = true;
  for (Link& link : links_) {
    if (link.is_made) write(link, Kind::leave);
    link.has_left = true;
  }
}

}  // namespace keras_hpc
