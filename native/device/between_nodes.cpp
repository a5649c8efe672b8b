// SPDX-License-Identifier: Apache-2.0
#include "device/between_nodes.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"
#include "device/direct_plan.hpp"

namespace keras_hpc {

std::shared_ptr<Plan> BetweenNodes::make_plan(Team& peers, const Plan& whole, const Topology& topology) {
  std::vector<TensorSpec> parts;
  size_t most = 1;
  for (const Bucket& bucket : whole.layout().buckets()) {
    const size_t nbytes = part_of(bucket, topology.local_size(), topology.local_rank).size();
    parts.push_back({"part of bucket " + std::to_string(parts.size()), bucket.dtype,
                     static_cast<int64_t>(nbytes / size_of(bucket.dtype))});
    most = std::max(most, nbytes);
  }
  PlanOptions options;
  options.op = whole.op();
  options.weighted = whole.is_weighted();
  options.wire = whole.wire();
  options.in_segment = true;
  options.bucket_bytes = most;  // so that no part waits for the next
  return peers.make_plan(whole.name(), parts, options);
}

BetweenNodes::BetweenNodes(const device::Device& device, std::shared_ptr<Team> peers, std::shared_ptr<Plan> parts)
    : device_(device), peers_(std::move(peers)), parts_(std::move(parts)), memory_(parts_->memory()) {
  const Layout& layout = parts_->layout();
  if (layout.nbytes() > 0) pinned_ = std::make_unique<device::Pinned>(device, memory_.get(), layout.nbytes());
  for (int b = 0; b < layout.tensor_count(); ++b) arrived_.push_back(std::make_unique<device::Event>(device));
}

BetweenNodes::~BetweenNodes() {
  try {
    peers_->end_plan(*parts_);
  } catch (const Error&) {  // in the middle of a step, or after an error: it ends with the team
  }
}

void BetweenNodes::begin(double weight_of_node) {
  weight_ = weight_of_node;
  left_ = sent_ = 0;
}

void BetweenNodes::leave(int bucket, device::Pointer from, device::StreamHandle stream) {
  if (nbytes(bucket) > 0)
    device_.check(device_.api().copy_to_host(place(bucket), from, nbytes(bucket), stream), "cuMemcpyDtoHAsync");
  arrived_[at(bucket)]->record(stream);
  left_ = bucket + 1;
}

void BetweenNodes::send() {
  for (; sent_ < left_ && arrived_[at(sent_)]->is_over(); ++sent_) peers_->start(*parts_, sent_, place(sent_), weight_);
}

void BetweenNodes::come_back(int bucket, device::Pointer to, device::StreamHandle stream) {
  peers_->wait(*parts_, bucket);
  if (nbytes(bucket) > 0)
    device_.check(device_.api().copy_to_device(to, place(bucket), nbytes(bucket), stream), "cuMemcpyHtoDAsync");
}

void BetweenNodes::throw_if_failed() const {
  try {
    peers_->throw_if_failed();
  } catch (const Error& error) {
    throw Error(std::string("Between nodes, where each node counts as one rank: ") + error.what());
  }
}

void BetweenNodes::abandon() {
  pinned_.release();
  new std::shared_ptr<std::byte>(memory_);
}

}  // namespace keras_hpc
