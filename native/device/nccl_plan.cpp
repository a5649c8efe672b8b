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

class Others final : public Awaited {
 public:
  explicit Others(const Plan& plan) : plan_(plan) {}
  std::string name() const override { return "Step of " + plan_.what() + ", which GPUs reduce by NCCL"; }
  std::vector<int> missing() const override { return {}; }  // NCCL does not say
  Stall stall() const override { return {}; }

 private:
  const Plan& plan_;
};

}  // namespace

// What a courier looks out for, while it waits.
struct NcclPlan::Watch {
  NcclPlan& plan;
  Others others{plan.plan_};
  Lookout lookout = plan.team_.lookout();
  double limit = plan.time_limit();
  const char* hint = "the time limit. Do all ranks run the same number of steps?";
  Clock::time_point looked_at = Clock::now(), moved_at = looked_at;

  // `what` the device, or other ranks, have not done; null: it is for this rank's script to go on.
  void look(const char* what) {
    {
      const std::lock_guard lock(plan.mutex_);
      if (plan.error_) std::rethrow_exception(plan.error_);
    }
    plan.team_.throw_if_failed();
    if (what == nullptr) moved_at = Clock::now();
    if (seconds_since(looked_at) < kLookSeconds) return std::this_thread::sleep_for(kNap);
    looked_at = Clock::now();
    lookout.look(others);
    if (plan.communicator_ != nullptr) plan.communicator_->throw_if_failed();
    if (seconds_since(moved_at) > limit)
      throw Timeout("NCCL has not " + std::string(what) + " (" + plan.plan_.what() + ") on rank " +
                    std::to_string(plan.team_.topology().rank) + " after " + std::to_string(static_cast<int>(limit)) +
                    " s, " + hint);
  }
};

NcclPlan::NcclPlan(Team& team, Plan& plan, int ordinal, const device::NcclId& id)
    : DevicePlan(team, plan, ordinal),
      memory_(plan.memory()),
      numbers_(device::pages(kNumbersBytes)),
      pinned_numbers_(std::make_unique<device::Pinned>(device_, numbers_.get(), kNumbersBytes)),
      // A bucket may be filled up to a whole word.
      buckets_(std::make_unique<device::Buffer>(device_, plan.layout().nbytes() + sizeof(double))),
      sum_of_weights_(std::make_unique<device::Buffer>(device_, sizeof(double))),
      stream_(std::make_unique<device::Stream>(device_)),
      came_(std::make_unique<device::Event>(device_)),
      end_(std::make_unique<device::Event>(device_)) {
  if (plan.layout().nbytes() > 0)
    pinned_ = std::make_unique<device::Pinned>(device_, memory_.get(), plan.layout().nbytes());
  for (int t = 0; t < count(); ++t) tensors_.push_back(std::make_unique<Tensor>(device_));
  Watch watch{*this};
  watch.limit = std::min(kConnectPart * watch.limit, kConnectSeconds);
  watch.hint =
      "as long as this may take. NCCL may look for them on another network interface than the one that connects them, "
      "which NCCL_SOCKET_IFNAME can name. NCCL_DEBUG=INFO lets it say what it does.";
  communicator_ = std::make_unique<device::Communicator>(device_, id, team.topology().rank, team.topology().size,
                                                         [&] { watch.look("connected the GPUs"); });
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
  for (const auto& memory : {memory_, numbers_}) new std::shared_ptr<std::byte>(memory);
}

// ---- the caller's threads

void NcclPlan::begin(int tensor, const DeviceWeight& weight) {
  throw_if_failed();
  if (of(tensor).started) throw Error(plan_.describe(tensor) + " was started twice without a wait in between.");
  if (++started_ == 1) {
    weight_ = weight;
    turn_.emplace(team_.turns());
  }
  of(tensor).started = true;
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
  if (nbytes(tensor) > 0 && !of(tensor).started) {
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
  throw_if_failed();
  for (int t = 0; t < count(); ++t)
    if (!of(t).started) throw Error(plan_.describe(t) + " was waited for but not started.");
  await_end(lock, over_);
  for (const auto& tensor : tensors_) tensor->started = false;
  started_ = 0;
  over_ = false;
}

void NcclPlan::second_on(const std::vector<device::Pointer>&, device::StreamHandle) {
  throw Error("Plan '" + plan_.name() + "' is not pipelined.");
}

// ---- the courier

void NcclPlan::serve() {
  try {
    while (!stopping_) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stopping_ || (!error_ && !over_ && started_ > 0); });
      }
      if (!stopping_) step();
    }
    team_.throw_if_failed();
  } catch (const std::exception&) {
    if (!stopping_) fail(std::current_exception());
    communicator_->abort();
  }
  const std::lock_guard lock(mutex_);  // after an error there is no other step
  turn_.reset();
}

void NcclPlan::step() {
  Watch watch{*this};
  while (!has_turn()) watch.look("come to this step: that of a plan which was started before is not over");
  const std::optional<double> mine = factor(watch);
  for (const Bucket& bucket : plan_.layout().buckets()) {
    while (!has_begun(bucket)) watch.look(nullptr);
    enqueue(bucket, mine);
  }
  end_->record(stream_->handle());
  while (!end_->is_over()) watch.look("reduced the tensors");
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
    turn_.reset();
  }
  changed_.notify_all();
}

bool NcclPlan::has_turn() {
  const std::lock_guard lock(mutex_);
  return turn_->has_come();
}

bool NcclPlan::has_begun(const Bucket& bucket) {
  const std::lock_guard lock(mutex_);
  for (int t = bucket.first; t <= bucket.last; ++t)
    if (!of(t).started) return false;
  return true;
}

// By what this rank's values are multiplied; none: they are added up as they are.
std::optional<double> NcclPlan::factor(Watch& watch) {
  if (plan_.op() == Op::sum) return std::nullopt;
  if (!plan_.is_weighted()) return 1.0 / team_.topology().size;
  DeviceWeight weight;
  {
    const std::lock_guard lock(mutex_);
    weight = weight_;
  }
  double mine = weight.number;
  if (weight.at != 0) {
    while (!came_->is_over()) watch.look("computed this rank's weight");
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
  while (!came_->is_over()) watch.look("added up the ranks' weights");
  double sum;
  std::memcpy(&sum, numbers_.get() + kSum, sizeof sum);
  return sum > 0 ? mine / sum : 0.0;
}

void NcclPlan::enqueue(const Bucket& bucket, std::optional<double> factor) {
  const device::Api& api = device_.api();
  device::StreamHandle const stream = stream_->handle();
  const size_t size = size_of(bucket.dtype), nbytes = bucket.end - bucket.begin;
  const auto for_parts = [&](auto&& f) {
    for (int t = bucket.first; t <= bucket.last; ++t) {
      const Range part = plan_.layout().part(t, {bucket.begin, bucket.end});
      if (!part.empty()) f(of(t), part, part.begin - plan_.layout().range(t).begin);
    }
  };
  // A rank without samples: its values may be NaN.
  if (factor == 0.0)
    device_.check(api.set_words(in_bucket(bucket.begin), 0, (nbytes + 3) / 4, stream), "cuMemsetD32Async");
  for_parts([&](Tensor& t, const Range& part, size_t offset) {
    if (t.data != 0) t.ready.make_wait(stream);
    if (factor == 0.0) return;
    if (t.data != 0)
      device_.check(api.copy_within(in_bucket(part.begin), t.data + offset, part.size(), stream), "cuMemcpyDtoDAsync");
    else
      device_.check(api.copy_to_device(in_bucket(part.begin), memory_.get() + part.begin, part.size(), stream),
                    "cuMemcpyHtoDAsync");
  });
  communicator_->all_reduce(in_bucket(bucket.begin), nbytes / size, bucket.dtype, factor, stream);
  for_parts([&](Tensor& t, const Range& part, size_t offset) {
    if (t.data != 0)
      device_.check(api.copy_within(t.data + offset, in_bucket(part.begin), part.size(), stream), "cuMemcpyDtoDAsync");
    else
      device_.check(api.copy_to_host(memory_.get() + part.begin, in_bucket(part.begin), part.size(), stream),
                    "cuMemcpyDtoHAsync");
  });
}

}  // namespace keras_hpc
