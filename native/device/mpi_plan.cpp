// SPDX-License-Identifier: Apache-2.0
#include "device/mpi_plan.hpp"

#include <algorithm>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {
namespace {

enum Tag { kScatter, kGather };

void* as_data(device::Pointer pointer) {
  return reinterpret_cast<void*>(pointer);
}

// What is over need not be kept.
void end_receives(Pending& messages) {
  messages.cancel();
  try {
    messages.test();
  } catch (const Error&) {  // MPI may still use the memory
  }
}

}  // namespace

// MPI may go on with it when the plan has ended.
struct MpiPlan::Memory {
  Memory(int ordinal, size_t bucket_bytes, size_t received_bytes)
      : device(ordinal), buckets(device, bucket_bytes), received(device, received_bytes) {}
  const device::Device device;
  const device::Buffer buckets, received;  // all buckets; this rank's part of each, of all ranks
};
struct MpiPlan::Numbers {
  double weight = 1;
  std::vector<double> of_rank;
};

MpiPlan::MpiPlan(Team& team, Plan& plan, int ordinal, std::unique_ptr<Channel> channel)
    : DirectPlan(team, plan, ordinal),
      channel_(std::move(channel)),
      sums_(std::make_unique<device::Stream>(device_)),
      end_(std::make_unique<device::Event>(device_)),
      kernel_(std::make_unique<device::SumKernel>(device_)) {
  const Topology& topology = team.topology();
  if (!team.takes_device_memory()) throw Error("The MPI library does not say that it takes memory of GPUs.");
  constexpr size_t least = 16;
  size_t end = 0, received_end = 0;
  for (int b = 0; b < bucket_count(); ++b) {
    begins_.push_back(end);
    received_begins_.push_back(received_end);
    end += bucket(b).end - bucket(b).begin;
    received_end += part(b, topology.rank).size() * at(topology.size);
    filled_.push_back(std::make_unique<device::Event>(device_));
    summed_.push_back(std::make_unique<device::Event>(device_));
  }
  scatters_.resize(filled_.size());
  gathers_.resize(filled_.size());
  memory_ = std::make_shared<Memory>(ordinal, std::max(end, least), std::max(received_end, least));
  numbers_ = std::make_shared<Numbers>(Numbers{1, std::vector<double>(at(topology.size), 1.0)});
  run_courier([this] { serve(); });
}

MpiPlan::~MpiPlan() {
  stop();
}

void MpiPlan::abandon() {
  DirectPlan::abandon();
  new std::shared_ptr<Memory>(memory_);
}

// Of a step that others may still send messages of: MPI must give their context to nobody else.
void MpiPlan::abort() {
  for (auto* of_buckets : {&scatters_, &gathers_})
    for (const auto& messages : *of_buckets)
      if (messages != nullptr) end_receives(*messages);
  static_cast<void>(channel_.release());
}

std::vector<int> MpiPlan::missing() const {
  if (awaited_ == nullptr || awaited_->peer() < 0) return {};
  return {awaited_->peer()};
}

device::Pointer MpiPlan::place_of(int number) const {
  return memory_->buckets.data() + begins_[at(number)];
}

device::Pointer MpiPlan::received_from(int number, int rank) const {
  const Range mine = part(number, team_.topology().rank);
  if (rank == team_.topology().rank) return place_of(number) + mine.begin;
  return memory_->received.data() + received_begins_[at(number)] + mine.size() * at(rank);
}

// ---- the courier

void MpiPlan::step(Watch& watch) {
  weigh(plan_.is_weighted() ? own_weight(watch) : 1.0);
  for (int b = 0; b < bucket_count(); ++b) receive_parts(b);
  // Buckets before these have come so far.
  int filling = 0, scattering = 0, summing = 0, gathering = 0, back = 0;
  while (back < bucket_count()) {
    const int before = filling + scattering + summing + gathering + back;
    awaited_ = nullptr;
    if (filling < bucket_count() && has_begun(bucket(filling))) {
      copy_in(filling, place_of(filling), stream_->handle());
      filled_[at(filling++)]->record(stream_->handle());
    }
    if (scattering < filling && filled_[at(scattering)]->is_over()) send_parts(scattering++);
    if (summing < scattering && knows_weights() && have_come(scatters_[at(summing)])) {
      receive_sums(summing);
      add_up(summing);
      summed_[at(summing++)]->record(sums_->handle());
    }
    if (gathering < summing && summed_[at(gathering)]->is_over()) send_sum(gathering++);
    if (back < gathering && have_come(gathers_[at(back)])) {
      copy_out(back, place_of(back), sums_->handle());
      ++back;
    }
    if (before < filling + scattering + summing + gathering + back)
      watch.moved();
    else
      watch.look(back == filling ? nullptr : "reduced the tensors");
  }
  end_->record(sums_->handle());
  watch.until([&] { return end_->is_over(); }, "reduced the tensors");
}

std::unique_ptr<Pending>& MpiPlan::begin_messages(std::vector<std::unique_ptr<Pending>>& of_buckets, int number) {
  return of_buckets[at(number)] = std::make_unique<Pending>(memory_);
}

bool MpiPlan::have_come(const std::unique_ptr<Pending>& messages) {
  if (messages->test()) return true;
  if (awaited_ == nullptr) awaited_ = messages.get();
  return false;
}

void MpiPlan::weigh(double mine) {
  if (!plan_.is_weighted()) return find_weights_of(numbers_->of_rank, weights_);
  numbers_->weight = mine;
  weighing_ = std::make_unique<Pending>(numbers_);
  weighing_->add(channel_->allgather(&numbers_->weight, numbers_->of_rank.data(),
                                     std::vector<size_t>(numbers_->of_rank.size(), sizeof mine)));
}

bool MpiPlan::knows_weights() {
  if (weighing_ == nullptr) return true;
  if (!have_come(weighing_)) return false;
  weighing_.reset();
  find_weights_of(numbers_->of_rank, weights_);
  return true;
}

void MpiPlan::receive_parts(int number) {
  const auto& messages = begin_messages(scatters_, number);
  const Topology& topology = team_.topology();
  const size_t nbytes = part(number, topology.rank).size();
  for (int r = 0; nbytes > 0 && r < topology.size; ++r)
    if (r != topology.rank) messages->add(channel_->receive(as_data(received_from(number, r)), nbytes, r, kScatter), r);
}

void MpiPlan::send_parts(int number) {
  for (int r = 0; r < team_.topology().size; ++r) {
    const Range theirs = part(number, r);
    if (r != team_.topology().rank && !theirs.empty())
      scatters_[at(number)]->add(channel_->send(as_data(place_of(number) + theirs.begin), theirs.size(), r, kScatter),
                                 r);
  }
}

void MpiPlan::add_up(int number) {
  const Topology& topology = team_.topology();
  const Range mine = part(number, topology.rank);
  if (mine.empty()) return;
  std::vector<device::Pointer> parts;
  for (int r = 0; r < topology.size; ++r) parts.push_back(received_from(number, r));
  device::Sum sum = device::sum_of(parts, weights_, mine.size());
  sum.outs[sum.n_outs++] = place_of(number) + mine.begin;
  kernel_->launch(bucket(number).dtype, sum, sums_->handle());
}

// Into what this rank has sent of the bucket.
void MpiPlan::receive_sums(int number) {
  const auto& messages = begin_messages(gathers_, number);
  for (int r = 0; r < team_.topology().size; ++r) {
    const Range theirs = part(number, r);
    if (r != team_.topology().rank && !theirs.empty())
      messages->add(channel_->receive(as_data(place_of(number) + theirs.begin), theirs.size(), r, kGather), r);
  }
}

void MpiPlan::send_sum(int number) {
  const Topology& topology = team_.topology();
  const Range mine = part(number, topology.rank);
  for (int r = 0; !mine.empty() && r < topology.size; ++r)
    if (r != topology.rank)
      gathers_[at(number)]->add(channel_->send(as_data(place_of(number) + mine.begin), mine.size(), r, kGather), r);
}

}  // namespace keras_hpc
