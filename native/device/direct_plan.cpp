// SPDX-License-Identifier: Apache-2.0
#include "device/direct_plan.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {
namespace {

constexpr double kLookSeconds = 1e-3;
// A library may look for the others where they are not, and hang. A rank that cannot connect waits for those that hang,
// to tell them: so these wait for less long than it does.
constexpr double kConnectSeconds = 120, kConnectPart = 0.5;

}  // namespace

size_t part_bytes(const Bucket& bucket, int ranks) {
  constexpr size_t line = 64;
  const size_t nbytes = bucket.end - bucket.begin, per_line = line * at(ranks);
  return (nbytes + per_line - 1) / per_line * line;
}

Range part_of(const Bucket& bucket, int ranks, int rank) {
  const size_t nbytes = bucket.end - bucket.begin, each = part_bytes(bucket, ranks);
  const size_t begin = std::min(nbytes, each * at(rank));
  return {begin, std::min(nbytes, begin + each)};
}

DirectPlan::Watch::Watch(DirectPlan& plan)
    : plan_(plan), others_(plan), lookout_(plan.team_.lookout()), limit_(plan.time_limit()) {}

void DirectPlan::Watch::limit_connecting(const char* hint) {
  limit_ = std::min(kConnectPart * plan_.time_limit(), kConnectSeconds);
  hint_ = hint;
}

void DirectPlan::Watch::look(const char* what) {
  {
    const std::lock_guard lock(plan_.mutex_);
    if (plan_.error_) std::rethrow_exception(plan_.error_);
  }
  plan_.go_on();
  if (what == nullptr) moved();
  if (seconds_since(looked_at_) < kLookSeconds) return std::this_thread::sleep_for(kNap);
  looked_at_ = Clock::now();
  lookout_.look(others_);
  plan_.throw_if_way_failed();
  if (seconds_since(moved_at_) > limit_)
    throw Timeout(plan_.have_not() + (" " + std::string(what)) + " (" + plan_.plan_.what() + ") on rank " +
                  std::to_string(plan_.team_.topology().rank) + " after " + std::to_string(static_cast<int>(limit_)) +
                  " s, " + hint_);
}

DirectPlan::DirectPlan(Team& team, Plan& plan, int ordinal)
    : DevicePlan(team, plan, ordinal),
      stream_(std::make_unique<device::Stream>(device_)),
      memory_(plan.memory()),
      weight_place_(device::pages(sizeof(double))),
      pinned_weight_(std::make_unique<device::Pinned>(device_, weight_place_.get(), sizeof(double))),
      came_(std::make_unique<device::Event>(device_)) {
  if (plan.layout().nbytes() > 0)
    pinned_ = std::make_unique<device::Pinned>(device_, memory_.get(), plan.layout().nbytes());
  for (int t = 0; t < count(); ++t) tensors_.push_back(std::make_unique<Tensor>(device_));
}

void DirectPlan::abandon() {
  pinned_.release();
  pinned_weight_.release();
  for (const auto& memory : {memory_, weight_place_}) new std::shared_ptr<std::byte>(memory);
}

// ---- the caller's threads

void DirectPlan::begin(int tensor, const DeviceWeight& weight) {
  throw_if_failed();
  count_in(tensor, weight);
  if (started_ == 1) begin_step();
}

void DirectPlan::start_on(int tensor, device::Pointer data, const DeviceWeight& weight, device::StreamHandle stream) {
  guarded<device::DriverError>([&] {
    check_memory(tensor, data);
    const std::lock_guard lock(mutex_);
    begin(tensor, weight);
    Tensor& t = of(tensor);
    t.data = nbytes(tensor) > 0 ? data : 0;
    t.ready.record(stream);
    if (started_ > 1 || weight.at == 0 || !plan_.is_weighted()) return;
    t.ready.make_wait(stream_->handle());
    device_.check(device_.api().copy_to_host(weight_place_.get(), weight.at, weight.nbytes, stream_->handle()),
                  "cuMemcpyDtoHAsync");
    came_->record(stream_->handle());
  });
  changed_.notify_all();
}

void DirectPlan::start(int tensor, const void* data, double weight) {
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

void DirectPlan::wait_on(device::StreamHandle) {
  std::unique_lock lock(mutex_);
  await_step(lock);
  forget_step();
}

void DirectPlan::second_on(const std::vector<device::Pointer>&, device::StreamHandle) {
  throw Error("Plan '" + plan_.name() + "' is not pipelined.");
}

// ---- the courier

void DirectPlan::serve() {
  try {
    while (!stopping_) {
      await_start();
      if (stopping_) break;
      Watch watch(*this);
      step(watch);
      end_step();
    }
    team_.throw_if_failed();
  } catch (const std::exception&) {
    if (!stopping_) fail(std::current_exception());
    abort();
  }
}

bool DirectPlan::has_begun(const Bucket& bucket) {
  const std::lock_guard lock(mutex_);
  for (int t = bucket.first; t <= bucket.last; ++t)
    if (!is_started_[at(t)]) return false;
  return true;
}

double DirectPlan::own_weight(Watch& watch) {
  DeviceWeight weight;
  {
    const std::lock_guard lock(mutex_);
    weight = weight_;
  }
  if (weight.at == 0) return weight.number;
  watch.until([&] { return came_->is_over(); }, "computed this rank's weight");
  if (weight.nbytes == sizeof(double)) {
    std::memcpy(&weight.number, weight_place_.get(), sizeof(double));
    return weight.number;
  }
  float number;
  std::memcpy(&number, weight_place_.get(), sizeof number);
  return number;
}

void DirectPlan::find_weights_of(const std::vector<double>& of_rank, Weights& found) const {
  const double total = std::accumulate(of_rank.begin(), of_rank.end(), 0.0);
  find_weights(of_rank, plan_.op() == Op::mean ? total : 1.0, found);
}

// Calls f(tensor, where its part of the bucket is in this memory, and on the host, its place in the tensor, its bytes).
template <class F>
void DirectPlan::for_parts(int number, device::Pointer memory, F&& f) {
  const Bucket& its = bucket(number);
  for (int t = its.first; t <= its.last; ++t) {
    const Range part = plan_.layout().part(t, {its.begin, its.end});
    if (part.empty()) continue;
    // What is queued before an error is awaited by whoever tells the caller of it, and nothing is queued afterwards.
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    f(of(t), memory + (part.begin - its.begin), memory_.get() + part.begin, part.begin - plan_.layout().range(t).begin,
      part.size());
  }
}

void DirectPlan::copy_in(int number, device::Pointer bucket, device::StreamHandle stream) {
  const device::Api& api = device_.api();
  for_parts(number, bucket, [&](Tensor& t, device::Pointer to, std::byte* host, size_t offset, size_t nbytes) {
    if (t.data == 0) {
      device_.check(api.copy_to_device(to, host, nbytes, stream), "cuMemcpyHtoDAsync");
      return;
    }
    t.ready.make_wait(stream);
    device_.check(api.copy_within(to, t.data + offset, nbytes, stream), "cuMemcpyDtoDAsync");
  });
}

void DirectPlan::copy_out(int number, device::Pointer bucket, device::StreamHandle stream) {
  const device::Api& api = device_.api();
  for_parts(number, bucket, [&](Tensor& t, device::Pointer from, std::byte* host, size_t offset, size_t nbytes) {
    if (t.data != 0)
      device_.check(api.copy_within(t.data + offset, from, nbytes, stream), "cuMemcpyDtoDAsync");
    else
      device_.check(api.copy_to_host(host, from, nbytes, stream), "cuMemcpyDtoHAsync");
  });
}

}  // namespace keras_hpc
