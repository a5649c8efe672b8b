// SPDX-License-Identifier: Apache-2.0
#include "device/nccl_plan.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {
namespace {

// Of the numbers on the host, where each is.
constexpr size_t kWeight = 0, kSum = 8, kFromDevice = 16, kNumbersBytes = 24;
constexpr double kLookSeconds = 1e-3;
// NCCL may look for the others where they are not, and hang. A rank that cannot connect waits for those that hang, to
// tell them: so these wait for less long than it does.
constexpr double kConnectSeconds = 120, kConnectPart = 0.5;

}  // namespace

// What a courier looks out for, while it waits.
struct NcclPlan::Watch {
  class Others final : public Awaited {
   public:
    explicit Others(const Plan& plan) : plan_(plan) {}
    std::string name() const override { return "Step of " + plan_.what() + ", which GPUs reduce by NCCL"; }
    std::vector<int> missing() const override { return {}; }  // NCCL does not say
    Stall stall() const override { return {}; }

   private:
    const Plan& plan_;
  };

  NcclPlan& plan;
  Others others{plan.plan_};
  Lookout lookout = plan.team_.lookout();
  double limit = plan.time_limit();
  const char* hint = "the time limit. Do all ranks run the same number of steps?";
  Clock::time_point looked_at = Clock::now(), moved_at = looked_at;

  template <class Ready>
  void until(Ready&& ready, const char* what) {
    while (!ready()) look(what);
  }

  // `what` the device, or other ranks, have not done; null: it is for this rank's script to go on.
  void look(const char* what) {
    {
      const std::lock_guard lock(plan.mutex_);
      if (plan.error_) std::rethrow_exception(plan.error_);
    }
    if (plan.between_) plan.between_->send();
    if (what == nullptr) moved_at = Clock::now();
    if (seconds_since(looked_at) < kLookSeconds) return std::this_thread::sleep_for(kNap);
    looked_at = Clock::now();
    lookout.look(others);
    if (plan.communicator_) plan.communicator_->throw_if_failed();
    if (plan.between_) plan.between_->throw_if_failed();
    if (seconds_since(moved_at) > limit)
      throw Timeout("NCCL has not " + std::string(what) + " (" + plan.plan_.what() + ") on rank " +
                    std::to_string(plan.team_.topology().rank) + " after " + std::to_string(static_cast<int>(limit)) +
                    " s, " + hint);
  }
};

NcclPlan::NcclPlan(Team& team, Plan& plan, int ordinal, const device::NcclId& id, const Peers& peers)
    : DevicePlan(team, plan, ordinal),
      memory_(plan.memory()),
      numbers_(device::pages(kNumbersBytes)),
      pinned_numbers_(std::make_unique<device::Pinned>(device_, numbers_.get(), kNumbersBytes)),
      sum_of_weights_(std::make_unique<device::Buffer>(device_, sizeof(double))),
      stream_(std::make_unique<device::Stream>(device_)),
      came_(std::make_unique<device::Event>(device_)),
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
  if (plan.layout().nbytes() > 0)
    pinned_ = std::make_unique<device::Pinned>(device_, memory_.get(), plan.layout().nbytes());
  for (int t = 0; t < count(); ++t) tensors_.push_back(std::make_unique<Tensor>(device_));
  Watch watch{*this};
  watch.limit = std::min(kConnectPart * watch.limit, kConnectSeconds);
  watch.hint =
      "as long as this may take. NCCL may look for them on another network interface than the one that connects them, "
      "which NCCL_SOCKET_IFNAME can name. NCCL_DEBUG=INFO lets it say what it does.";
  communicator_ =
      std::make_unique<device::Communicator>(device_, id, rank, size, [&] { watch.look("connected the GPUs"); });
  run_courier([this] { serve(); });
}

NcclPlan::~NcclPlan() {
  stop();
}

void NcclPlan::abandon() {
  pinned_.release();
  pinned_numbers_.release();
  buckets_.release();
  sum_of_weights_.release();
  if (between_) between_->abandon();
  for (const auto& memory : {memory_, numbers_}) new std::shared_ptr<std::byte>(memory);
}

// ---- the caller's threads

void NcclPlan::begin(int tensor, const DeviceWeight& weight) {
  throw_if_failed();
  count_in(tensor, weight);
  if (started_ == 1) turn_.emplace(team_.turns());
}

void NcclPlan::start_on(int tensor, device::Pointer data, const DeviceWeight& weight, device::StreamHandle stream) {
  guarded<device::DriverError>([&] {
    check_memory(tensor, data);
    const std::lock_guard lock(mutex_);
    begin(tensor, weight);
    Tensor& t = of(tensor);
    t.data = nbytes(tensor) > 0 ? data : 0;
    t.ready.record(stream);
    if (started_ > 1 || weight.at == 0 || !plan_.is_weighted()) return;
    t.ready.make_wait(stream_->handle());
    device_.check(device_.api().copy_to_host(numbers_.get() + kFromDevice, weight.at, weight.nbytes, stream_->handle()),
                  "cuMemcpyDtoHAsync");
    came_->record(stream_->handle());
  });
  changed_.notify_all();
}

void NcclPlan::start(int tensor, const void* data, double weight) {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  if (nbytes(tensor) > 0 && !is_started_[at(tensor)]) {
    if (data == nullptr)
      std::memset(place(tensor), 0, nbytes(tensor));
    else if (data != place(tensor))
      std::memcpy(place(tensor), data, nbytes(tensor));
  }
  begin(tensor, {weight});
  of(tensor).data = 0;
  changed_.notify_all();
}

void NcclPlan::wait_on(device::StreamHandle) {
  std::unique_lock lock(mutex_);
  await_step(lock);
  forget_step();
}

void NcclPlan::second_on(const std::vector<device::Pointer>&, device::StreamHandle) {
  throw Error("Plan '" + plan_.name() + "' is not pipelined.");
}

// ---- the courier

void NcclPlan::serve() {
  try {
    while (!stopping_) {
      await_start();
      if (!stopping_) step();
    }
    team_.throw_if_failed();
  } catch (const std::exception&) {
    if (!stopping_) fail(std::current_exception());
    communicator_->abort();
  }
}

void NcclPlan::step() {
  Watch watch{*this};
  watch.until([&] { return has_turn(); }, "come to this step: that of a plan which was started before is not over");
  const Weights weights = weigh(watch);
  if (between_) between_->begin(weights.sum);
  for (int b = 0; b < bucket_count(); ++b) {
    watch.until([&] { return has_begun(bucket(b)); }, nullptr);
    fill(b, weights.factor);
    reduce(b, weights.factor);
    if (!between_) give_back(b);
  }
  // Not before: what NCCL is given is in one order on all ranks, whatever comes first from other nodes.
  for (int b = 0; between_ && b < bucket_count(); ++b) {
    watch.until([&] { return between_->is_back(b); }, "sent the tensors to the other nodes, or not all nodes theirs");
    gather(b);
    give_back(b);
  }
  end_->record(stream_->handle());
  watch.until([&] { return end_->is_over(); }, "reduced the tensors");
  {
    const std::lock_guard lock(mutex_);
    turn_.reset();
  }
  end_step();
}

bool NcclPlan::has_turn() {
  const std::lock_guard lock(mutex_);
  return turn_->has_come();
}

bool NcclPlan::has_begun(const Bucket& bucket) {
  const std::lock_guard lock(mutex_);
  for (int t = bucket.first; t <= bucket.last; ++t)
    if (!is_started_[at(t)]) return false;
  return true;
}

NcclPlan::Weights NcclPlan::weigh(Watch& watch) {
  if (plan_.op() == Op::sum) return {};
  if (!plan_.is_weighted()) return {1.0 / communicator_->size()};
  DeviceWeight weight;
  {
    const std::lock_guard lock(mutex_);
    weight = weight_;
  }
  double mine = weight.number;
  if (weight.at != 0) {
    watch.until([&] { return came_->is_over(); }, "computed this rank's weight");
    float number;
    std::memcpy(&number, numbers_.get() + kFromDevice, sizeof number);
    std::memcpy(&mine, numbers_.get() + kFromDevice, sizeof mine);
    if (weight.nbytes == sizeof number) mine = number;
  }
  const device::Api& api = device_.api();
  std::memcpy(numbers_.get() + kWeight, &mine, sizeof mine);
  const device::Pointer on_device = sum_of_weights_->data();
  device_.check(api.copy_to_device(on_device, numbers_.get() + kWeight, sizeof mine, stream_->handle()),
                "cuMemcpyHtoDAsync");
  communicator_->all_reduce(on_device, 1, DType::float64, std::nullopt, stream_->handle());
  device_.check(api.copy_to_host(numbers_.get() + kSum, on_device, sizeof mine, stream_->handle()),
                "cuMemcpyDtoHAsync");
  came_->record(stream_->handle());
  watch.until([&] { return came_->is_over(); }, "added up the ranks' weights");
  double sum;
  std::memcpy(&sum, numbers_.get() + kSum, sizeof sum);
  return {sum > 0 ? mine / sum : 0.0, sum};
}

// Calls f(tensor, where its part of the bucket is on the device and on the host, its place in the tensor, its bytes).
template <class F>
void NcclPlan::for_parts(int number, F&& f) {
  const Bucket& its = bucket(number);
  for (int t = its.first; t <= its.last; ++t) {
    const Range part = plan_.layout().part(t, {its.begin, its.end});
    if (!part.empty())
      f(of(t), memory_of(number) + (part.begin - its.begin), memory_.get() + part.begin,
        part.begin - plan_.layout().range(t).begin, part.size());
  }
}

void NcclPlan::fill(int number, std::optional<double> factor) {
  const device::Api& api = device_.api();
  device::StreamHandle const stream = stream_->handle();
  // A rank without samples: its values may be NaN. Buckets are of whole lines.
  if (factor == 0.0)
    device_.check(api.set_words(memory_of(number), 0, (bucket(number).end - bucket(number).begin) / 4, stream),
                  "cuMemsetD32Async");
  for_parts(number, [&](Tensor& t, device::Pointer to, std::byte* host, size_t offset, size_t nbytes) {
    if (t.data != 0) t.ready.make_wait(stream);
    if (factor == 0.0) return;
    if (t.data != 0)
      device_.check(api.copy_within(to, t.data + offset, nbytes, stream), "cuMemcpyDtoDAsync");
    else
      device_.check(api.copy_to_device(to, host, nbytes, stream), "cuMemcpyHtoDAsync");
  });
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

void NcclPlan::give_back(int number) {
  const device::Api& api = device_.api();
  device::StreamHandle const stream = stream_->handle();
  for_parts(number, [&](Tensor& t, device::Pointer from, std::byte* host, size_t offset, size_t nbytes) {
    if (t.data != 0)
      device_.check(api.copy_within(t.data + offset, from, nbytes, stream), "cuMemcpyDtoDAsync");
    else
      device_.check(api.copy_to_host(host, from, nbytes, stream), "cuMemcpyDtoHAsync");
  });
}

}  // namespace keras_hpc
