// SPDX-License-Identifier: Apache-2.0
#include "engine/mailboxes.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

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

// A segment of them: as many of each rank, and before them which is for whom.
class Mailboxes::Part {
 public:
  Part(std::unique_ptr<Segment> segment, size_t ranks, size_t boxes_of_rank)
      : segment_(std::move(segment)), ranks_(ranks), boxes_of_rank_(boxes_of_rank) {}

  static size_t bytes(size_t ranks, size_t boxes_of_rank) {
    return table_bytes(ranks) + ranks * boxes_of_rank * sizeof(Box);
  }
  Box* assign(size_t from, size_t to, uint32_t index) {
    entry(from, to).store(index + 1, std::memory_order_release);
    return find(from, to);
  }
  Box* find(size_t from, size_t to) const {
    const uint32_t number = entry(from, to).load(std::memory_order_acquire);
    if (number == 0) return nullptr;
    auto* boxes = reinterpret_cast<Box*>(segment_->data() + table_bytes(ranks_));
    return boxes + from * boxes_of_rank_ + number - 1;
  }
  size_t nbytes() const { return segment_->nbytes(); }

 private:
  using Entry = std::atomic<uint32_t>;  // one more than its number; 0: none
  static size_t table_bytes(size_t ranks) {
    return (ranks * ranks * sizeof(Entry) + alignof(Box) - 1) / alignof(Box) * alignof(Box);
  }
  Entry& entry(size_t from, size_t to) const { return reinterpret_cast<Entry*>(segment_->data())[from * ranks_ + to]; }

  std::unique_ptr<Segment> segment_;
  size_t ranks_, boxes_of_rank_;
};

Mailboxes::Mailboxes(const TeamContext& team)
    : team_(team), mine_(at(team.topology->local_size())), theirs_(mine_.size()) {}

Mailboxes::~Mailboxes() = default;

bool Mailboxes::reaches(int to) const {
  return mine_[at(to)] != nullptr;
}

void Mailboxes::add(const std::vector<int>& to, size_t most, Transport& transport, Channel& control) {
  if (most == 0) return;
  const size_t ranks = mine_.size();
  Part made(transport.open_segment(control, Part::bytes(ranks, most)), ranks, most);
  for (size_t i = 0; i < to.size(); ++i)
    mine_[at(to[i])] = made.assign(at(team_.topology->local_rank), at(to[i]), static_cast<uint32_t>(i));
  const std::lock_guard lock(mutex_);
  parts_.push_back(std::move(made));
}

// The one that a rank has for this one; null: it has none, and so has written nothing.
Mailboxes::Box* Mailboxes::box_of(int from) {
  Box*& known = theirs_[at(from)];
  if (known != nullptr) return known;
  const std::lock_guard lock(mutex_);
  for (const Part& part : parts_)
    if (known == nullptr) known = part.find(at(from), at(team_.topology->local_rank));
  return known;
}

size_t Mailboxes::segment_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t nbytes = 0;
  for (const Part& part : parts_) nbytes += part.nbytes();
  return nbytes;
}

size_t Mailboxes::write(int to, const void* data, size_t nbytes) {
  Box& mine = *mine_[at(to)];
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
  Box* found = box_of(from);
  if (found == nullptr) return 0;
  Box& theirs = *found;
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
