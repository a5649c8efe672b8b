// SPDX-License-Identifier: Apache-2.0
#include "device/staged_plan.hpp"

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {
StagedPlan::StagedPlan(Team& team, Plan& plan, Pipeline* pipeline, int ordinal)
    : DevicePlan(team, plan, ordinal),
      pipeline_(pipeline),
      memory_(plan.memory()),
      own_(pipeline == nullptr ? nullptr : device::pages(plan.layout().nbytes())),
      places_(pipeline == nullptr ? memory_.get() : own_.get()),
      nbytes_(plan.layout().nbytes()),
      weight_place_(device::pages(sizeof(double))),
      out_(std::make_unique<device::Stream>(device_)),
      in_(std::make_unique<device::Stream>(device_)),
      back_(std::make_unique<device::Event>(device_)),
      free_(std::make_unique<device::Event>(device_)) {
  pinned_weight_ = std::make_unique<device::Pinned>(device_, weight_place_.get(), sizeof(double));
  if (nbytes_ > 0) pinned_ = std::make_unique<device::Pinned>(device_, places_, nbytes_);
  for (int t = 0; t < count(); ++t) tensors_.push_back(std::make_unique<Tensor>(device_));
  run_courier([this] { serve(); });
}

StagedPlan::~StagedPlan() {
  stop();
}

void StagedPlan::abandon() {
  pinned_.release();
  pinned_weight_.release();
  for (const auto& memory : {memory_, own_, weight_place_}) new std::shared_ptr<std::byte>(memory);
}

// ---- the caller's threads

void StagedPlan::begin(int tensor, const DeviceWeight& weight) {
  throw_if_failed();
  count_in(tensor, weight);
  moved_at_ = Clock::now();
}

void StagedPlan::start_on(int tensor, device::Pointer data, const DeviceWeight& weight, device::StreamHandle stream) {
  const device::Api& api = device_.api();
  guarded<device::DriverError>([&] {
    check_memory(tensor, data);
    const std::lock_guard lock(mutex_);
    begin(tensor, weight);
    Tensor& t = of(tensor);
    t.data = nbytes(tensor) > 0 ? data : 0;
    if (started_ == 1) back_->make_wait(out_->handle());  // places are free when the last step's means have left them
    t.ready.record(stream);
    t.ready.make_wait(out_->handle());
    if (started_ == 1 && weight.at != 0)
      device_.check(api.copy_to_host(weight_place_.get(), weight.at, weight.nbytes, out_->handle()),
                    "cuMemcpyDtoHAsync");
    if (t.data != 0)
      device_.check(api.copy_to_host(place(tensor), data, nbytes(tensor), out_->handle()), "cuMemcpyDtoHAsync");
    t.arrived.record(out_->handle());
    on_their_way_.push_back(tensor);
  });
  changed_.notify_all();
}

void StagedPlan::start(int tensor, const void* data, double weight) {
  guarded<device::DriverError>([&] {
    const std::lock_guard lock(mutex_);
    begin(tensor, {weight});
    of(tensor).data = 0;
  });
  guarded([&] {
    await_copies_back();
    if (nbytes(tensor) > 0 && data == nullptr)
      std::memset(place(tensor), 0, nbytes(tensor));
    else if (nbytes(tensor) > 0 && data != place(tensor))
      std::memcpy(place(tensor), data, nbytes(tensor));
    start_in_plan(tensor);
  });
  changed_.notify_all();
}

// The host is about to write where the last step's means may still be copied from. Normally they have long left.
void StagedPlan::await_copies_back() {
  awaits_copies_back_ = true;
  await([this] { return back_->is_over(); }, "copied the last step's means");
  awaits_copies_back_ = false;
}

void StagedPlan::wait_on(device::StreamHandle stream) {
  std::unique_lock lock(mutex_);
  await_step(lock);
  lock.unlock();
  guarded([&] { back_->make_wait(stream); });
  lock.lock();
  for (const auto& tensor : tensors_) tensor->in_plan = false;
  in_plan_ = back_count_ = 0;
  forget_step();
}

void StagedPlan::second_on(const std::vector<device::Pointer>& data, device::StreamHandle stream) {
  if (pipeline_ == nullptr) throw Error("Plan '" + plan_.name() + "' is not pipelined.");
  {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
  }
  guarded([&] {
    await_copies_back();
    // The caller's memory may be what its stream still reads as something else.
    free_->record(stream);
    free_->make_wait(in_->handle());
    for (int t = 0; t < count(); ++t) {
      pipeline_->second(t, place(t));
      const device::Pointer to = data[at(t)];
      if (nbytes(t) > 0 && to != 0)
        device_.check(device_.api().copy_to_device(to, place(t), nbytes(t), in_->handle()), "cuMemcpyHtoDAsync");
    }
    back_->record(in_->handle());
    back_->make_wait(stream);
  });
}

// ---- the courier

void StagedPlan::serve() {
  while (!stopping_) {
    await_start();
    if (stopping_) return;
    team_.throw_if_failed();
    const bool arrived = take_arrivals();
    const bool given_back = give_back();
    look_at_device(arrived || given_back);
    if (!arrived && !given_back) std::this_thread::sleep_for(kNap);
  }
}

// Once the caller has started all tensors, all that is missing is what the device has not computed or copied yet. While
// the caller waits for the last step's means, that is what is late: copies of new tensors come after these.
void StagedPlan::look_at_device(bool moved) {
  const std::lock_guard lock(mutex_);
  if (moved || started_ < count() || on_their_way_.empty() || awaits_copies_back_) moved_at_ = Clock::now();
  if (seconds_since(moved_at_) > team_.time_limit())
    throw late("computed '" + plan_.tensors()[at(on_their_way_.front())].name + "'");
}

// What has come from the device, in the order in which it was sent, starts in the plan.
bool StagedPlan::take_arrivals() {
  for (bool any = false;; any = true) {
    int tensor = -1;
    {
      const std::lock_guard lock(mutex_);
      if (!on_their_way_.empty()) tensor = on_their_way_.front();
    }
    if (tensor < 0 || !of(tensor).arrived.is_over()) return any;
    start_in_plan(tensor);
    const std::lock_guard lock(mutex_);
    on_their_way_.pop_front();
  }
}

void StagedPlan::start_in_plan(int tensor) {
  const double weight = weight_now();
  if (pipeline_ != nullptr)
    pipeline_->start(tensor, place(tensor), weight);
  else
    team_.start(plan_, tensor, place(tensor), weight);
  const std::lock_guard lock(mutex_);
  of(tensor).in_plan = true;
  ++in_plan_;
}

double StagedPlan::weight_now() const {
  if (weight_.at == 0) return weight_.number;
  float number;
  double exact;
  std::memcpy(&number, weight_place_.get(), sizeof number);
  std::memcpy(&exact, weight_place_.get(), sizeof exact);
  return weight_.nbytes == sizeof number ? number : exact;
}

// What is reduced goes back, in the plan's order; once all tensors are in the plan, this thread waits for them.
bool StagedPlan::give_back() {
  for (bool any = false;; any = true) {
    {
      const std::lock_guard lock(mutex_);
      const bool all = in_plan_ == count();
      const auto is_complete = [&] { return of(back_count_).in_plan && plan_.is_complete(back_count_); };
      if (!all && (pipeline_ != nullptr || !is_complete())) return any;
    }
    if (pipeline_ != nullptr)
      pipeline_->wait(back_count_);
    else
      team_.wait(plan_, back_count_);
    {
      const std::lock_guard lock(mutex_);
      if (error_) return any;  // and the memory may be the caller's again
      const Tensor& t = of(back_count_);
      if (t.data != 0)
        device_.check(device_.api().copy_to_device(t.data, place(back_count_), nbytes(back_count_), in_->handle()),
                      "cuMemcpyHtoDAsync");
    }
    if (++back_count_ < count()) continue;
    back_->record(in_->handle());
    end_step();
    return true;
  }
}

}  // namespace keras_hpc
