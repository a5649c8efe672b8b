// SPDX-License-Identifier: Apache-2.0
// What the GPUs of each node have added up by NCCL, on its way between nodes, on the engine's network.
//
// A bucket is cut into equal parts, one for each rank of the node. The ranks with one number on all nodes, the peers,
// are a team of their own, with a plan whose tensors are their parts of the buckets, in pinned memory:
//   leave        on the stream: the part is copied to the host, and then the event arrived[bucket]
//   send         once that is over, the part is started in the plan, in the order of the buckets
//   come_back    on the stream, once it is_back: the part is copied to the device
// All of it by one thread.
#pragma once
#include <memory>
#include <vector>

#include "device/device.hpp"
#include "engine/team.hpp"

namespace keras_hpc {

class BetweenNodes {
 public:
  // Collective on the peers: for a plan that all ranks reduce, each node having as many as this one.
  static std::shared_ptr<Plan> make_plan(Team& peers, const Plan& whole, const Topology& topology);

  // `parts` is what make_plan returned. Throws DriverError if its memory cannot be pinned.
  BetweenNodes(const device::Device& device, std::shared_ptr<Team> peers, std::shared_ptr<Plan> parts);
  ~BetweenNodes();
  BetweenNodes(const BetweenNodes&) = delete;
  BetweenNodes& operator=(const BetweenNodes&) = delete;

  void begin(double weight_of_node);
  void leave(int bucket, device::Pointer from, device::StreamHandle stream);
  void send();
  bool is_back(int bucket) const { return bucket < sent_ && parts_->is_complete(bucket); }
  void come_back(int bucket, device::Pointer to, device::StreamHandle stream);

  void throw_if_failed() const;
  void abandon();  // the device may still write to the memory: it is never given back

 private:
  size_t nbytes(int bucket) const { return parts_->layout().range(bucket).size(); }
  std::byte* place(int bucket) const { return memory_.get() + parts_->layout().range(bucket).begin; }

  const device::Device& device_;
  const std::shared_ptr<Team> peers_;
  const std::shared_ptr<Plan> parts_;
  const std::shared_ptr<std::byte> memory_;  // of the plan, which it may outlive
  std::unique_ptr<device::Pinned> pinned_;
  std::vector<std::unique_ptr<device::Event>> arrived_;  // [bucket]
  double weight_ = 1;
  int left_ = 0, sent_ = 0;  // of this step: the buckets before it
};

}  // namespace keras_hpc
