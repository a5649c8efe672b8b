// SPDX-License-Identifier: Apache-2.0
#include "engine/mailboxes.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "algorithms/kernels.hpp"
#include "common/index.hpp"

namespace keras_hpc {
namespace {

// Few enough for the processor's caches, so many that a border of an image seldom has to wait for its reader.
constexpr size_t kBytes = size_t{256} << 10;

}  // namespace

struct Mailboxes::Box {
  alignas(128) std::atomic<uint64_t> written;
  alignas(128) std::atomic<uint64_t> read;
  alignas(128) std::byte bytes[kBytes];
};

Mailboxes::Mailboxes(const TeamContext& team, Transport& transport, Channel& control) : team_(team) {
  const size_t local = at(team.topology->local_size());
  segment_ = transport.open_segment(control, local * local * sizeof(Box));
}

Mailboxes::Box& Mailboxes::box(int from, int to) const {
  auto* boxes = reinterpret_cast<Box*>(segment_->data());
  return boxes[at(from) * at(team_.topology->local_size()) + at(to)];
}

size_t Mailboxes::write(int to, const void* data, size_t nbytes) {
  Box& mine = box(team_.topology->local_rank, to);
  const uint64_t written = mine.written.load(std::memory_order_relaxed);
  const size_t room = kBytes - static_cast<size_t>(written - mine.read.load(std::memory_order_acquire));
  const size_t n = std::min(room, nbytes), place = written % kBytes, first = std::min(n, kBytes - place);
  if (n == 0) return 0;
  copy_shared(mine.bytes + place, data, first);
  if (first < n) copy_shared(mine.bytes, static_cast<const std::byte*>(data) + first, n - first);
  mine.written.store(written + n, std::memory_order_seq_cst);
  return n;
}

size_t Mailboxes::read(int from, void* data, size_t nbytes) {
  Box& theirs = box(from, team_.topology->local_rank);
  const uint64_t read = theirs.read.load(std::memory_order_relaxed);
  const auto there = static_cast<size_t>(theirs.written.load(std::memory_order_acquire) - read);
  const size_t n = std::min(there, nbytes), place = read % kBytes, first = std::min(n, kBytes - place);
  if (n == 0) return 0;
  copy_shared(data, theirs.bytes + place, first);
  if (first < n) copy_shared(static_cast<std::byte*>(data) + first, theirs.bytes, n - first);
  theirs.read.store(read + n, std::memory_order_seq_cst);
  return n;
}

void Mailboxes::notify(int local_rank) {
  team_.exchangers[local_rank].wake();
}

}  // namespace keras_hpc
