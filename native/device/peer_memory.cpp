// SPDX-License-Identifier: Apache-2.0
#include "device/peer_memory.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"
#include "common/waiting.hpp"

namespace keras_hpc::device {
namespace {

constexpr double kFarewellSeconds = 1;
// Of smaller allocations the driver shares others with the same page, too (documentation of cudaIpcGetMemHandle).
constexpr size_t kPage = 2 << 20;
constexpr auto kNap = std::chrono::microseconds(100);

// Ranks in containers may have the same number as processes.
uint64_t this_process() {
  static const uint64_t found = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return found;
}

std::mutex of_left;
auto& left = *new std::vector<std::shared_ptr<void>>;  // parts of ranks that have left

}  // namespace

struct PeerMemory::Mailbox {
  std::atomic<State> state;
  std::atomic<bool> has_left;
  uint64_t process;
  uint64_t data;  // where the process itself finds it
  MemoryHandle handle;
  char reason[400];
  alignas(64) std::atomic<uint64_t> counts[kStages];
  double weight;
};

// Of this rank. It may outlive the plan.
struct PeerMemory::Part {
  Part(int ordinal, std::shared_ptr<Area> area, int ranks, size_t nbytes)
      : device(ordinal), area(std::move(area)), ranks(ranks), buffer(device, (nbytes + kPage - 1) / kPage * kPage) {}
  Mailbox& mailbox(int local_rank) const { return *reinterpret_cast<Mailbox*>(area->of(local_rank)); }
  bool is_free() const {
    for (int r = 0; r < ranks; ++r)
      if (!mailbox(r).has_left && mailbox(r).state != State::refused) return false;
    return true;
  }
  const Device device;
  const std::shared_ptr<Area> area;
  const int ranks;
  const Buffer buffer;
};

size_t PeerMemory::area_bytes() {
  return sizeof(Mailbox);
}

void PeerMemory::refuse(const Area& area, const Topology& topology, const std::string& reason) {
  auto& mine = *reinterpret_cast<Mailbox*>(area.of(topology.local_rank));
  std::snprintf(mine.reason, sizeof mine.reason, "%s", reason.c_str());
  mine.state = State::refused;
}

PeerMemory::PeerMemory(int ordinal, std::shared_ptr<Area> area, const Topology& topology, size_t nbytes)
    : topology_(topology), parts_(at(topology.local_size())) {
  free_what_all_have_left();
  mine_ = std::make_shared<Part>(ordinal, std::move(area), topology.local_size(), nbytes);
  Mailbox& mine = mailbox(topology_.local_rank);
  const Device& device = mine_->device;
  const Current current(device);
  device.check(device.api().export_memory(&mine.handle, mine_->buffer.data()), "cuIpcGetMemHandle");
  mine.process = this_process();
  mine.data = parts_[at(topology_.local_rank)] = mine_->buffer.data();
  mine.state = State::shown;
}

PeerMemory::~PeerMemory() {
  leave();
}

void PeerMemory::leave() {
  if (mine_ == nullptr) return;
  const Device& device = mine_->device;
  ContextHandle before = nullptr;
  if (device.api().push_context(device.context()) == 0) {
    for (const Pointer part : opened_) device.api().close_memory(part);
    device.api().pop_context(&before);
  }
  mailbox(topology_.local_rank).has_left = true;
  const auto begin = Clock::now();
  while (!mine_->is_free() && seconds_since(begin) < kFarewellSeconds) std::this_thread::sleep_for(kNap);
  {
    const std::lock_guard lock(of_left);
    left.push_back(std::move(mine_));
  }
  free_what_all_have_left();
}

void PeerMemory::free_what_all_have_left() {
  const std::lock_guard lock(of_left);
  const auto is_free = [](const auto& part) { return std::static_pointer_cast<Part>(part)->is_free(); };
  left.erase(std::remove_if(left.begin(), left.end(), is_free), left.end());
}

PeerMemory::Mailbox& PeerMemory::mailbox(int local_rank) const {
  return mine_->mailbox(local_rank);
}

void PeerMemory::connect(const std::function<void()>& look) {
  const Device& device = mine_->device;
  for (int r = 0; r < topology_.local_size(); ++r) {
    if (r == topology_.local_rank) continue;
    const Mailbox& theirs = mailbox(r);
    while (theirs.state == State::unknown) look();
    if (theirs.state == State::refused) throw Error(theirs.reason);
    if (theirs.process == this_process()) {
      parts_[at(r)] = theirs.data;
      continue;
    }
    const Current current(device);
    device.check(device.api().open_memory(&parts_[at(r)], theirs.handle, kLazyPeerAccess), "cuIpcOpenMemHandle");
    opened_.push_back(parts_[at(r)]);
  }
}

void PeerMemory::tell(Stage stage, uint64_t count) {
  mailbox(topology_.local_rank).counts[static_cast<int>(stage)].store(count, std::memory_order_release);
}

bool PeerMemory::all_have(Stage stage, uint64_t count) const {
  for (int r = 0; r < topology_.local_size(); ++r)
    if (mailbox(r).counts[static_cast<int>(stage)].load(std::memory_order_acquire) < count) return false;
  return true;
}

std::vector<int> PeerMemory::behind(Stage stage, uint64_t count) const {
  std::vector<int> ranks;
  for (int r = 0; r < topology_.local_size(); ++r)
    if (mailbox(r).counts[static_cast<int>(stage)].load(std::memory_order_acquire) < count)
      ranks.push_back(topology_.local_ranks()[at(r)]);
  return ranks;
}

void PeerMemory::set_weight(double weight) {
  mailbox(topology_.local_rank).weight = weight;
}

double PeerMemory::weight_of(int local_rank) const {
  return mailbox(local_rank).weight;
}

void PeerMemory::abandon() {
  new std::shared_ptr<Part>(std::move(mine_));
}

double measure_peer_speed(int ordinal, const std::shared_ptr<Area>& area, const Topology& topology, size_t nbytes) {
  constexpr double limit_seconds = 30;
  PeerMemory memory(ordinal, area, topology, nbytes);
  const auto begin = Clock::now();
  memory.connect([&] {
    if (seconds_since(begin) > limit_seconds) throw Timeout("Other ranks have not shown their GPU's memory.");
    std::this_thread::sleep_for(kNap);
  });
  const Device device(ordinal);
  const Current current(device);
  const Buffer buffer(device, nbytes);
  const Stream stream(device);
  const Pointer theirs = memory.of((topology.local_rank + 1) % topology.local_size());
  return measure_speed(device, stream, nbytes, [&] {
    device.check(device.api().copy_within(buffer.data(), theirs, nbytes, stream.handle()), "cuMemcpyDtoDAsync");
  });
}

}  // namespace keras_hpc::device
