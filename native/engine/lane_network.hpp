// SPDX-License-Identifier: Apache-2.0
// What one lane of a plan has on its way between nodes: slices of buckets, some at a time, and the weight of an
// execution, which is the sum of all ranks' weights.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "algorithms/allreduce.hpp"
#include "common/waiting.hpp"
#include "transport/topology.hpp"

namespace keras_hpc {

class LaneNetwork {
 public:
  static constexpr size_t kInFlight = 4;       // slices
  static constexpr int kTags = kInFlight + 1;  // it uses so many

  // Between the owners of this rank's slice. `mpi_channel` is theirs alone, and this lane's; or none.
  LaneNetwork(Channel& channel, Channel* mpi_channel, const Topology& topology, int first_tag);

  // ---- slices, in the order of turns

  bool is_full() const { return on_way_.size() >= kInFlight; }
  // One that is empty is back at once.
  void begin(uint64_t turn, Algorithm algorithm, const AllreduceBuffer& slice);
  // With the weight in the same messages, for which there is memory behind the slice.
  void begin_with_weight(uint64_t turn, Algorithm algorithm, AllreduceBuffer slice, double of_node);
  // Takes the next turn that is back, once the weight is.
  struct Arrival {
    uint64_t turn;
    Clock::time_point begin;
  };
  std::optional<Arrival> take();

  // ---- the weight

  void begin_weight(double of_node);
  bool knows_weight() const { return weight_is_ == WeightIs::known; }
  double weight() const { return *weight_; }

  Progress advance();
  bool is_idle() const { return on_way_.empty() && knows_weight(); }
  // The rank whose message is awaited; -1: none, or one of many.
  int waiting_for() const;

 private:
  struct OnWay {
    uint64_t turn;
    bool back;
    Clock::time_point begin;
  };
  Allreduce& place_of(uint64_t turn) { return slices_[turn % kInFlight]; }

  Schedules schedules_;
  std::deque<Allreduce> slices_;  // one per place
  std::deque<OnWay> on_way_;
  Allreduce weight_operation_;
  std::shared_ptr<double> weight_ = std::make_shared<double>(0.0);
  enum class WeightIs { known, on_its_way, with_first_slice } weight_is_ = WeightIs::known;
};

}  // namespace keras_hpc
