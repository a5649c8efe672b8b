// SPDX-License-Identifier: Apache-2.0
#include "device/peer_plan.hpp"

#include <algorithm>

#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {

PeerPlan::PeerPlan(Team& team, Plan& plan, int ordinal, const std::shared_ptr<Area>& area)
    : DirectPlan(team, plan, ordinal),
      sums_(std::make_unique<device::Stream>(device_)),
      end_(std::make_unique<device::Event>(device_)),
      kernel_(std::make_unique<device::SumKernel>(device_)) {
  const Topology& topology = team.topology();
  size_t end = 0;
  for (const Bucket& bucket : plan.layout().buckets()) {
    begins_.push_back(end);
    end += bucket.end - bucket.begin;
    filled_.push_back(std::make_unique<device::Event>(device_));
    summed_.push_back(std::make_unique<device::Event>(device_));
  }
  memory_ = std::make_unique<device::PeerMemory>(ordinal, area, topology, std::max<size_t>(end, 16));
  Watch watch(*this);
  watch.limit_connecting("as long as this may take.");
  memory_->connect([&] { watch.look("shown their memory to each other"); });
  run_courier([this] { serve(); });
}

PeerPlan::~PeerPlan() {
  stop();
}

void PeerPlan::stop() {
  DirectPlan::stop();
  memory_->leave();
}

void PeerPlan::abandon() {
  DirectPlan::abandon();
  memory_->abandon();
}

// ---- the courier

void PeerPlan::step(Watch& watch) {
  memory_->set_weight(plan_.is_weighted() ? own_weight(watch) : 1.0);
  // Buckets before these have come so far.
  int filling = 0, filled = 0, summing = 0, summed = 0, back = 0;
  while (back < bucket_count()) {
    const int before = filling + filled + summing + summed + back;
    if (filling < bucket_count() && has_begun(bucket(filling))) {
      copy_in(filling, place_of(filling, team_.topology().local_rank), stream_->handle());
      filled_[at(filling++)]->record(stream_->handle());
    }
    if (filled < filling && filled_[at(filled)]->is_over()) memory_->tell(Stage::filled, before_ + at(++filled));
    if (summing < filled && all_have(Stage::filled, before_ + at(summing) + 1)) {
      if (summing == 0) find_factors();
      add_up(summing);
      summed_[at(summing++)]->record(sums_->handle());
    }
    if (summed < summing && summed_[at(summed)]->is_over()) memory_->tell(Stage::summed, before_ + at(++summed));
    if (back < summed && all_have(Stage::summed, before_ + at(back) + 1)) {
      copy_out(back, place_of(back, team_.topology().local_rank), sums_->handle());
      ++back;
    }
    if (before < filling + filled + summing + summed + back)
      watch.moved();
    else
      watch.look(back == filling ? nullptr : "reduced the tensors");
  }
  end_->record(sums_->handle());
  watch.until([&] { return end_->is_over(); }, "reduced the tensors");
  before_ += at(bucket_count());
}

bool PeerPlan::all_have(Stage stage, uint64_t count) {
  awaited_ = stage;
  awaited_count_ = count;
  return memory_->all_have(stage, count);
}

void PeerPlan::find_factors() {
  std::vector<double> of_rank;
  for (int r = 0; r < team_.topology().local_size(); ++r) of_rank.push_back(memory_->weight_of(r));
  find_weights_of(of_rank, weights_);
}

// This rank's part of a bucket.
void PeerPlan::add_up(int number) {
  const Topology& topology = team_.topology();
  const Range part = part_of(bucket(number), topology.local_size(), topology.local_rank);
  if (part.empty()) return;
  std::vector<device::Pointer> parts;
  for (int r = 0; r < topology.local_size(); ++r) parts.push_back(place_of(number, r) + part.begin);
  device::Sum sum = device::sum_of(parts, weights_, part.size());
  for (const device::Pointer theirs : parts) sum.outs[sum.n_outs++] = theirs;
  kernel_->launch(bucket(number).dtype, sum, sums_->handle());
}

}  // namespace keras_hpc
