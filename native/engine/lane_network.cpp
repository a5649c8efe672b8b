// SPDX-License-Identifier: Apache-2.0
#include "engine/lane_network.hpp"

namespace keras_hpc {

LaneNetwork::LaneNetwork(Channel& channel, Channel* mpi_channel, const Topology& topology, int first_tag)
    : schedules_({topology.peers_of_slice(topology.local_rank), topology.node, mpi_channel}),
      weight_operation_(channel, schedules_, first_tag + static_cast<int>(kInFlight)) {
  for (int place = 0; place < static_cast<int>(kInFlight); ++place)
    slices_.emplace_back(channel, schedules_, first_tag + place);
}

void LaneNetwork::begin(uint64_t turn, Algorithm algorithm, const AllreduceBuffer& slice) {
  if (slice.count > 0) place_of(turn).begin(algorithm, slice);
  on_way_.push_back({turn, slice.count == 0, Clock::now()});
}

void LaneNetwork::begin_with_weight(uint64_t turn, Algorithm algorithm, AllreduceBuffer slice, double of_node) {
  *weight_ = of_node;
  weight_is_ = WeightIs::with_first_slice;  // all of the execution before have been taken
  slice.rider = weight_.get();
  begin(turn, algorithm, slice);
}

std::optional<LaneNetwork::Arrival> LaneNetwork::take() {
  if (on_way_.empty() || !on_way_.front().back || !knows_weight()) return std::nullopt;
  const Arrival arrival{on_way_.front().turn, on_way_.front().begin};
  on_way_.pop_front();
  return arrival;
}

void LaneNetwork::begin_weight(double of_node) {
  *weight_ = of_node;
  weight_operation_.begin(Algorithm::recursive_doubling,
                          {weight_.get(), 1, DType::float64, DType::float64, Op::sum, weight_});
  weight_is_ = WeightIs::on_its_way;
}

int LaneNetwork::waiting_for() const {
  if (weight_is_ == WeightIs::on_its_way) return weight_operation_.waiting_for();
  for (const OnWay& slice : on_way_)
    if (!slice.back) return slices_[slice.turn % kInFlight].waiting_for();
  return -1;
}

Progress LaneNetwork::advance() {
  bool moved = false;
  const auto drive = [&moved](Allreduce& operation) {
    const Progress progress = operation.advance();
    moved = moved || progress != Progress::none;
    return progress == Progress::done;
  };
  if (weight_is_ == WeightIs::on_its_way && drive(weight_operation_)) weight_is_ = WeightIs::known;
  for (OnWay& slice : on_way_)
    if (!slice.back) slice.back = drive(place_of(slice.turn));
  if (weight_is_ == WeightIs::with_first_slice && on_way_.front().back) weight_is_ = WeightIs::known;
  return is_idle() ? Progress::done : moved ? Progress::some : Progress::none;
}

}  // namespace keras_hpc
