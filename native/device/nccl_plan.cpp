// SPDX-License-Identifier: Apache-2.0
#include "device/nccl_plan.hpp"

#include <algorithm>
#include <cstring>

#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {
namespace {

// Of the numbers on the host, where each is.
constexpr size_t kWeight = 0, kSum = 8, kNumbersBytes = 16;

}  // namespace

NcclPlan::NcclPlan(Team& team, Plan& plan, int ordinal, const device::NcclId& id, const Peers& peers)
    : DirectPlan(team, plan, ordinal),
      numbers_(device::pages(kNumbersBytes)),
      pinned_numbers_(std::make_unique<device::Pinned>(device_, numbers_.get(), kNumbersBytes)),
      sum_of_weights_(std::make_unique<device::Buffer>(device_, sizeof(double))),
      summed_(std::make_unique<device::Event>(device_)),
      end_(std::make_unique<device::Event>(device_)) {
  if (peers.team != nullptr) between_ = std::make_unique<BetweenNodes>(device_, peers.team, peers.parts);
  const Topology& topology = team.topology();
  const int rank = between_ ? topology.local_rank : topology.rank;
  const int size = between_ ? topology.local_size() : topology.size;
  size_t end = 0;
  for (const Bucket& bucket : plan.layout().buckets()) {
    begins_.push_back(end);
    end += part_bytes(bucket, size) * at(size);
  }
  buckets_ = std::make_unique<device::Buffer>(device_, std::max(end, sizeof(double)));
  Watch watch(*this);
  watch.limit_connecting(
      "as long as this may take. NCCL may look for them on another network interface than the one that connects them, "
      "which NCCL_SOCKET_IFNAME can name. NCCL_DEBUG=INFO lets it say what it does.");
  communicator_ =
      std::make_unique<device::Communicator>(device_, id, rank, size, [&] { watch.look("connected the GPUs"); });
  run_courier([this] { serve(); });
}

NcclPlan::~NcclPlan() {
  stop();
}

void NcclPlan::abandon() {
  DirectPlan::abandon();
  pinned_numbers_.release();
  buckets_.release();
  sum_of_weights_.release();
  if (between_) between_->abandon();
  new std::shared_ptr<std::byte>(numbers_);
}

// ---- the courier

void NcclPlan::go_on() {
  if (between_) between_->send();
}

void NcclPlan::throw_if_way_failed() {
  if (communicator_) communicator_->throw_if_failed();
  if (between_) between_->throw_if_failed();
}

void NcclPlan::step(Watch& watch) {
  watch.until([&] { return has_turn(); }, "come to this step: that of a plan which was started before is not over");
  const Weights weights = weigh(watch);
  if (between_) between_->begin(weights.sum);
  for (int b = 0; b < bucket_count(); ++b) {
    watch.until([&] { return has_begun(bucket(b)); }, nullptr);
    fill(b, weights.factor);
    reduce(b, weights.factor);
    if (!between_) copy_out(b, memory_of(b), stream_->handle());
  }
  // Not before: what NCCL is given is in one order on all ranks, whatever comes first from other nodes.
  for (int b = 0; between_ && b < bucket_count(); ++b) {
    watch.until([&] { return between_->is_back(b); }, "sent the tensors to the other nodes, or not all nodes theirs");
    gather(b);
    copy_out(b, memory_of(b), stream_->handle());
  }
  end_->record(stream_->handle());
  watch.until([&] { return end_->is_over(); }, "reduced the tensors");
  const std::lock_guard lock(mutex_);
  turn_.reset();
}

bool NcclPlan::has_turn() {
  const std::lock_guard lock(mutex_);
  return turn_->has_come();
}

NcclPlan::Weights NcclPlan::weigh(Watch& watch) {
  if (plan_.op() == Op::sum) return {};
  if (!plan_.is_weighted()) return {1.0 / communicator_->size()};
  const double mine = own_weight(watch);
  const device::Api& api = device_.api();
  std::memcpy(numbers_.get() + kWeight, &mine, sizeof mine);
  const device::Pointer on_device = sum_of_weights_->data();
  device_.check(api.copy_to_device(on_device, numbers_.get() + kWeight, sizeof mine, stream_->handle()),
                "cuMemcpyHtoDAsync");
  communicator_->all_reduce(on_device, 1, DType::float64, std::nullopt, stream_->handle());
  device_.check(api.copy_to_host(numbers_.get() + kSum, on_device, sizeof mine, stream_->handle()),
                "cuMemcpyDtoHAsync");
  summed_->record(stream_->handle());
  watch.until([&] { return summed_->is_over(); }, "added up the ranks' weights");
  double sum;
  std::memcpy(&sum, numbers_.get() + kSum, sizeof sum);
  return {sum > 0 ? mine / sum : 0.0, sum};
}

void NcclPlan::fill(int number, std::optional<double> factor) {
  device::StreamHandle const stream = stream_->handle();
  copy_in(number, memory_of(number), stream);
  // A rank without samples: its values may be NaN. Buckets are of whole lines.
  if (factor == 0.0)
    device_.check(
        device_.api().set_words(memory_of(number), 0, (bucket(number).end - bucket(number).begin) / 4, stream),
        "cuMemsetD32Async");
}

void NcclPlan::reduce(int number, std::optional<double> factor) {
  const DType dtype = bucket(number).dtype;
  const device::Pointer data = memory_of(number);
  const size_t each = part_bytes(bucket(number), communicator_->size()) / size_of(dtype);
  if (!between_)
    return communicator_->all_reduce(data, (bucket(number).end - bucket(number).begin) / size_of(dtype), dtype, factor,
                                     stream_->handle());
  communicator_->reduce_scatter(data, each, dtype, factor, stream_->handle());
  between_->leave(number, communicator_->part_of(data, each, dtype), stream_->handle());
}

void NcclPlan::gather(int number) {
  const DType dtype = bucket(number).dtype;
  const size_t each = part_bytes(bucket(number), communicator_->size()) / size_of(dtype);
  between_->come_back(number, communicator_->part_of(memory_of(number), each, dtype), stream_->handle());
  communicator_->all_gather(memory_of(number), each, dtype, stream_->handle());
}

}  // namespace keras_hpc
