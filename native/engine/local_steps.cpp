// SPDX-License-Identifier: Apache-2.0
#include "engine/local_steps.hpp"

#include <cstring>
#include <memory>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {
namespace {

// Of a rank that has seen no samples. Its weights are no different from those at the period's start, and count for
// nothing beside a sample; but where no rank has seen any, the mean of weights is not zero.
constexpr double kNoSamples = 1e-18;

template <class T>
void add_difference(void* data, const void* mean, const void* sent, size_t nbytes) {
  auto* x = static_cast<T*>(data);
  const auto *to = static_cast<const T*>(mean), *from = static_cast<const T*>(sent);
  for (size_t i = 0; i < nbytes / sizeof(T); ++i) x[i] += to[i] - from[i];
}

}  // namespace

// What remains to be done when the communication thread has finished the plan.
struct LocalSteps::Continuation {
  LocalSteps* steps;
  Done done;
  void* arg;

  static void run(void* argument, const char* error) {
    const std::unique_ptr<Continuation> self(static_cast<Continuation*>(argument));
    if (error != nullptr) return self->done(self->arg, error);
    try {
      self->steps->arrived();
      self->steps->advance(self->done, self->arg);
    } catch (const std::exception& e) {
      self->done(self->arg, e.what());
    }
  }
};

LocalSteps::LocalSteps(Team& team, Plan& plan, const LocalOptions& options)
    : team_(team), plan_(plan), options_(options), data_(at(count())) {
  if (options.every > 0 && options.overlap >= options.every)
    throw Error("An average that is overlapped with steps must arrive before the next one begins.");
  for (int t = 0; t < count(); ++t) {
    const DType dtype = plan.tensors()[at(t)].dtype;
    if (options.outer && t < options.weights) outer_.emplace_back(options.rate, options.momentum, dtype, nbytes(t));
    if (options.overlap == 0) continue;
    if (dtype != DType::float32 && dtype != DType::float64)
      throw Error(std::string("Averages that are overlapped with steps need float32 or float64. Received: ") +
                  name_of(dtype));
    mean_.emplace_back(nbytes(t));
    sent_.emplace_back(nbytes(t));
  }
}

void LocalSteps::set_schedule(uint64_t synchronous, uint64_t local) {
  const std::lock_guard lock(mutex_);
  first_ = step_ + synchronous;
  end_ = first_ + local;
}

int LocalSteps::begin(double samples) {
  const std::lock_guard lock(mutex_);
  if (started_ > 0 || waited_ > 0)
    throw Error("A step of plan '" + plan_.name() + "' began before the average of the one before was over.");
  const uint64_t now = step_++;
  lands_ = false;
  exchange_ = Exchange::none;
  if (now < first_ || now >= end_) return synchronous;
  ++taken_;
  ++since_;
  samples_ += samples;
  const bool ends_phase = now + 1 == end_;
  const bool ends = ends_phase || (options_.every > 0 && since_ >= options_.every);
  if (ends) exchange_ = options_.overlap > 0 && !ends_phase ? Exchange::launch : Exchange::wait;
  lands_ = travelling_ && (ends || since_ >= options_.overlap);
  int mode = 0;
  if (anchored_ < static_cast<int>(outer_.size())) mode |= anchor;
  if (lands_ || ends) mode |= exchange;
  if (ends_phase) mode |= last;
  return mode;
}

void LocalSteps::set_anchor(int tensor, const void* weights) {
  const std::lock_guard lock(mutex_);
  if (at(tensor) >= outer_.size()) throw Error(plan_.describe(tensor) + " has no outer optimizer.");
  outer_[at(tensor)].set_anchor(weights);
  ++anchored_;
}

bool LocalSteps::finish() {
  const std::lock_guard lock(mutex_);
  if (started_ > 0) throw Error("A step of plan '" + plan_.name() + "' is not over.");
  lands_ = travelling_;
  exchange_ = since_ > 0 ? Exchange::wait : Exchange::none;
  return lands_ || since_ > 0;
}

double LocalSteps::weight() const {
  return samples_ > 0 ? samples_ : kNoSamples;
}

void LocalSteps::start(int tensor, void* data) {
  {
    const std::lock_guard lock(mutex_);
    if (!lands_ && exchange_ == Exchange::none)
      throw Error(plan_.describe(tensor) + " was started in a step without an average.");
    data_[at(tensor)] = data;
    ++started_;
    waits_ = waits_ || starts_early();
  }
  if (starts_early()) team_.start(plan_, tensor, data, weight());
}

void LocalSteps::check_started() {
  if (started_ != count())
    throw Error("An average of plan '" + plan_.name() + "' was waited for before all of its tensors were started.");
}

bool LocalSteps::next() {
  if (waits_) return true;
  if (lands_) {
    if (!landed_) return waits_ = true;
    land();
  }
  if (exchange_ == Exchange::wait) {
    for (int t = 0; t < count(); ++t) team_.start(plan_, t, data_[at(t)], weight());
    return waits_ = true;
  }
  if (exchange_ == Exchange::launch) launch();
  return false;
}

// The plan is over.
void LocalSteps::arrived() {
  waits_ = false;
  if (lands_) {
    landed_ = true;
    return;
  }
  for (size_t t = 0; t < outer_.size(); ++t) outer_[t].apply(data_[t]);
  exchange_ = Exchange::none;
  since_ = 0;
  samples_ = 0;
  anchored_ = 0;
}

void LocalSteps::land() {
  for (int t = 0; t < count(); ++t) {
    auto& mean = mean_[at(t)];
    if (at(t) < outer_.size()) outer_[at(t)].apply(mean.data());
    if (since_ == 0)  // exactly the same on all ranks
      std::memcpy(data_[at(t)], mean.data(), mean.size());
    else if (plan_.tensors()[at(t)].dtype == DType::float32)
      add_difference<float>(data_[at(t)], mean.data(), sent_[at(t)].data(), mean.size());
    else
      add_difference<double>(data_[at(t)], mean.data(), sent_[at(t)].data(), mean.size());
  }
  lands_ = travelling_ = landed_ = false;
  if (since_ == 0) anchored_ = 0;
}

void LocalSteps::launch() {
  for (int t = 0; t < count(); ++t) {
    std::memcpy(sent_[at(t)].data(), data_[at(t)], nbytes(t));
    std::memcpy(mean_[at(t)].data(), data_[at(t)], nbytes(t));
    team_.start(plan_, t, mean_[at(t)].data(), weight());
  }
  exchange_ = Exchange::none;
  travelling_ = true;
  landed_ = false;
  since_ = 0;
  samples_ = 0;
}

void LocalSteps::end() {
  const std::lock_guard lock(mutex_);
  started_ = 0;
}

void LocalSteps::wait(int tensor) {
  if (waited_ == 0) {
    check_started();
    while (next()) {
      for (int t = 0; t < count(); ++t) team_.wait(plan_, t);
      arrived();
    }
    end();
  }
  static_cast<void>(tensor);
  if (++waited_ == count()) waited_ = 0;
}

void LocalSteps::advance(Done done, void* arg) {
  if (!next()) {
    end();
    return done(arg, nullptr);
  }
  auto rest = std::make_unique<Continuation>(Continuation{this, done, arg});
  if (!team_.wait_all_async(plan_, Continuation::run, rest.get())) throw Error("The team has no thread any more.");
  static_cast<void>(rest.release());
}

bool LocalSteps::wait_all_async(Done done, void* arg) {
  if (team_.threads() == 0) return false;
  check_started();
  advance(done, arg);
  return true;
}

LocalSteps::State LocalSteps::state() {
  if (started_ > 0 || waited_ > 0) throw Error("A step of plan '" + plan_.name() + "' is not over.");
  if (travelling_ && !landed_) {
    for (int t = 0; t < count(); ++t) team_.wait(plan_, t);
    landed_ = true;
  }
  return {since_, samples_, anchored_ > 0 && at(anchored_) == outer_.size(), travelling_};
}

void LocalSteps::restore(const State& state) {
  const std::lock_guard lock(mutex_);
  if (travelling_ && !landed_) throw Error("An average of plan '" + plan_.name() + "' is on its way.");
  since_ = state.since;
  samples_ = state.samples;
  anchored_ = state.anchored ? static_cast<int>(outer_.size()) : 0;
  travelling_ = landed_ = state.travelling;
}

std::vector<std::byte>& LocalSteps::memory(Kind kind, int tensor) {
  const auto find = [&](auto& list) -> auto& {
    if (tensor < 0 || at(tensor) >= list.size()) throw Error("There is no such memory of a plan with local steps.");
    return list[at(tensor)];
  };
  switch (kind) {
    case Kind::anchor:
      return find(outer_).anchor();
    case Kind::velocity:
      return find(outer_).velocity();
    case Kind::mean:
      return find(mean_);
    default:
      return find(sent_);
  }
}

}  // namespace keras_hpc
