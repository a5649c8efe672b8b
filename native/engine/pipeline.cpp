// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "common/error.hpp"
#include "engine/team.hpp"

namespace keras_hpc {
namespace {

void swap_memory(std::byte* a, std::byte* b, size_t nbytes) {
  std::byte block[4096];
  for (size_t begin = 0; begin < nbytes; begin += sizeof block) {
    const size_t n = std::min(sizeof block, nbytes - begin);
    std::memcpy(block, a + begin, n);
    std::memcpy(a + begin, b + begin, n);
    std::memcpy(b + begin, block, n);
  }
}

}  // namespace

// What remains to be done when the communication thread has finished the plan.
struct Pipeline::Continuation {
  Pipeline* pipeline;
  std::function<void()> then;
  Done done;
  void* arg;

  static void run(void* argument, const char* error) {
    const std::unique_ptr<Continuation> self(static_cast<Continuation*>(argument));
    if (error != nullptr) return self->done(self->arg, error);
    try {
      self->pipeline->landed_ = true;
      self->then();
    } catch (const std::exception& e) {
      return self->done(self->arg, e.what());
    }
    self->done(self->arg, nullptr);
  }
};

Pipeline::Pipeline(Team& team, Plan& plan)
    : team_(team),
      plan_(plan),
      memory_(plan.memory()),
      data_(static_cast<size_t>(plan.layout().tensor_count())),
      awaited_(data_.size()) {}

void Pipeline::set_schedule(uint64_t synchronous, uint64_t pipelined) {
  const std::lock_guard lock(mutex_);
  first_ = step_ + synchronous;
  end_ = first_ + pipelined;
}

std::byte* Pipeline::memory(int tensor) const {
  return memory_.get() + plan_.layout().range(tensor).begin;
}

void Pipeline::start_memory(int tensor) {
  team_.start(plan_, tensor, memory(tensor), weight_);
}

void Pipeline::start(int tensor, void* data, double weight) {
  {
    const std::lock_guard lock(mutex_);
    if (awaited_[static_cast<size_t>(tensor)])
      throw Error(plan_.describe(tensor) + " was started twice without a wait in between.");
    if (started_ == 0) {
      synchronous_now_ = step_ < first_ || step_ >= end_;
      updates_ = static_cast<int>(outstanding_) + static_cast<int>(synchronous_now_);
      weight_ = weight;
    }
    ++started_;
    awaited_[static_cast<size_t>(tensor)] = true;
    data_[static_cast<size_t>(tensor)] = data;
  }
  if (!early()) return;
  std::memcpy(memory(tensor), data, nbytes(tensor));
  start_memory(tensor);
}

void Pipeline::begin_turn() {
  const std::lock_guard lock(mutex_);
  if (started_ != count())
    throw Error("A step of plan '" + plan_.name() + "' was waited for before all of its tensors were started.");
  started_ = 0;
  ++step_;
  if (early()) landed_ = false;
}

void Pipeline::land() {
  if (landed_) return;
  for (int t = 0; t < count(); ++t) team_.wait(plan_, t);
  landed_ = true;
}

// The memory holds the average of the step before, or of this one if it was started early; or nothing.
void Pipeline::turn(int tensor) {
  if (!awaited_[static_cast<size_t>(tensor)]) throw Error(plan_.describe(tensor) + " was waited for but not started.");
  awaited_[static_cast<size_t>(tensor)] = false;
  auto* data = static_cast<std::byte*>(data_[static_cast<size_t>(tensor)]);
  if (early())
    std::memcpy(data, memory(tensor), nbytes(tensor));
  else if (outstanding_)
    swap_memory(data, memory(tensor), nbytes(tensor));
  else
    std::memcpy(memory(tensor), data, nbytes(tensor));
  if (!early()) start_memory(tensor);
  if (++turned_ < count()) return;
  turned_ = 0;
  if (early()) return;
  outstanding_ = true;
  landed_ = false;
  taken_ = 0;
}

// One after the other, so that a framework can make the updates of a tensor while it is still in the caches.
void Pipeline::wait(int tensor) {
  if (turned_ == 0) {
    begin_turn();
    if (outstanding_ || early()) land();
  }
  turn(tensor);
}

void Pipeline::turn_all() {
  for (int t = 0; t < count(); ++t) turn(t);
}

bool Pipeline::land_async(std::function<void()> then, Done done, void* arg) {
  auto rest = std::make_unique<Continuation>(Continuation{this, std::move(then), done, arg});
  if (landed_) {
    Continuation::run(rest.release(), nullptr);
    return true;
  }
  if (!team_.wait_all_async(plan_, Continuation::run, rest.get())) return false;
  static_cast<void>(rest.release());
  return true;
}

bool Pipeline::wait_all_async(Done done, void* arg) {
  if (team_.threads() == 0) return false;
  begin_turn();
  if (outstanding_ || early()) return land_async([this] { turn_all(); }, done, arg);
  turn_all();
  done(arg, nullptr);
  return true;
}

void Pipeline::take_second(int tensor, void* data) {
  std::memcpy(data, memory(tensor), nbytes(tensor));
  if (++taken_ == count()) outstanding_ = false;
}

void Pipeline::second(int tensor, void* data) {
  land();
  take_second(tensor, data);
}

bool Pipeline::second_async(const std::vector<void*>& data, Done done, void* arg) {
  if (team_.threads() == 0) return false;
  return land_async(
      [this, data] {
        for (int t = 0; t < count(); ++t) take_second(t, data[static_cast<size_t>(t)]);
      },
      done, arg);
}

bool Pipeline::take(const std::vector<void*>& data, bool keep) {
  if (!outstanding_) return false;
  if (turned_ > 0)  // the memory holds some averages, and some gradients
    throw Error("A step of plan '" + plan_.name() + "' is not over: no average can be taken from it.");
  land();
  for (int t = 0; t < count(); ++t) std::memcpy(data[static_cast<size_t>(t)], memory(t), nbytes(t));
  outstanding_ = keep;
  return true;
}

void Pipeline::put(const std::vector<const void*>& data) {
  if (started_ > 0 || turned_ > 0 || (outstanding_ && !landed_))
    throw Error("A step of plan '" + plan_.name() + "' is not over: no average can be put into it.");
  for (int t = 0; t < count(); ++t) std::memcpy(memory(t), data[static_cast<size_t>(t)], nbytes(t));
  outstanding_ = true;
  landed_ = true;
  taken_ = 0;
}

}  // namespace keras_hpc
