// SPDX-License-Identifier: Apache-2.0
// How callers of a team wait for the tensors of a plan: in their own thread, or by being called back.
#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"
#include "engine/trace.hpp"

namespace keras_hpc {
namespace {

// Copying less than this takes less time than asking the clock what it took.
constexpr size_t kQuickBytes = 4096;

}  // namespace

void Team::wait(Plan& plan, int tensor) {
  plan.check_started(tensor);
  const size_t nbytes = plan.layout().range(tensor).size();
  const bool quick = plan.is_complete(tensor) && nbytes < kQuickBytes && !trace::enabled;
  const auto begin = quick ? Clock::time_point() : Clock::now();
  if (!quick && !plan.is_complete(tensor)) guarded([&] { await(plan, tensor); });
  plan.release(tensor);
  if (!quick) add(exposed_seconds_, seconds_since(begin));
  if (trace::enabled) trace::record(plan.tensors()[at(tensor)].name, "wait", number(), begin);
}

class Team::TensorWait final : public Awaited {
 public:
  TensorWait(const Team& team, const Plan& plan, int tensor, Clock::time_point since)
      : team_(team), plan_(plan), tensor_(tensor), since_(since) {}
  std::string name() const override { return plan_.describe(tensor_); }
  // Who has its own slices, and waits for a neighbour's that waits for another node, does not know for whom.
  std::vector<int> missing() const override {
    const Topology& topology = team_.topology();
    std::vector<int> found = plan_.missing_ranks(tensor_);
    const auto is_near = [&](int rank) { return topology.is_local(rank); };
    const bool waits_itself = plan_.owes_slice(tensor_, topology.rank);
    if (topology.node_count > 1 && !waits_itself && std::none_of(found.begin(), found.end(), is_near)) found.clear();
    return found;
  }
  bool needs(int rank) const override { return plan_.owes_slice(tensor_, rank); }
  std::vector<int> suspects() const override {
    std::vector<int> found;
    for (const int rank : team_.topology().local_ranks())
      if (rank != team_.topology().rank && plan_.owes_slice(tensor_, rank)) found.push_back(rank);
    return found;
  }
  bool is_outside() const override {
    for (int lane = 0; team_.options_.threads == 0 && lane < static_cast<int>(team_.lanes_.size()); ++lane)
      if (team_.lanes_[at(lane)]->network_is_busy) return true;
    return false;
  }
  Stall stall() const override {
    return {plan_.what(),
            plan_.step(),
            plan_.tensors()[at(tensor_)].name,
            tensor_,
            [&plan = plan_, tensor = tensor_] { return plan.missing_ranks(tensor); },
            since_};
  }

 private:
  const Team& team_;
  const Plan& plan_;
  int tensor_;
  Clock::time_point since_;
};

void Team::await(Plan& plan, int tensor) {
  const TensorWait wait(*this, plan, tensor, Clock::now());
  // Between nodes each step that is done counts as an answer: whoever waits for the next one is patient again.
  const auto ready = [&] {
    failure_->throw_if_set();
    if (plan.is_complete(tensor)) return true;
    const bool advanced = progress_all();
    return plan.is_complete(tensor) || (advanced && wait.is_outside());
  };
  Bell& bell = context_.callers[topology().local_rank];
  int idle = -1;
  while (!plan.is_complete(tensor))
    if (!wait_watched(context_, bell, ready, wait, &idle)) throw late(plan, tensor, idle);
  // Who was to be woken for what has come just now was this thread.
  progress_all();
}

bool Team::wait_all_async(Plan& plan, void (*done)(void*, const char*), void* arg) {
  throw_if_failed();
  if (options_.threads == 0) return false;
  {
    std::unique_lock lock(async_mutex_);
    if (failure_->is_set()) {  // again: fail() empties the list after it has set the error
      lock.unlock();
      throw_if_failed();
    }
    async_.push_back({&plan, 0, done, arg, Clock::now(), Lookout(*failure_)});
    ++asynchronous_waits_;
  }
  context_.my_bell().ring();
  return true;
}

Timeout Team::late(const Plan& plan, int tensor, int idle) const {
  std::vector<int> missing = plan.missing_ranks(tensor);
  std::vector<int> late = failure_->outside_mpi(missing);
  if (late.empty() && idle >= 0) late = {idle};
  const bool is_known = !late.empty();
  if (is_known) missing = std::move(late);
  const auto is_near = [this](int rank) { return topology().is_local(rank); };
  const auto near =
      std::find_if(missing.begin(), missing.end(), [&](int rank) { return rank != topology().rank && is_near(rank); });
  int culprit = near == missing.end() || !is_known ? -1 : *near;
  if (topology().node_count > 1 && std::none_of(missing.begin(), missing.end(), is_near)) {
    culprit = idle >= 0 ? idle : plan.owes_slice(tensor, topology().rank) ? peer_awaited(plan) : -1;
    const auto neighbours = TensorWait(*this, plan, tensor, Clock::now()).suspects();
    if (culprit < 0 && missing.size() == 1 && neighbours.empty()) culprit = missing[0];
    missing.insert(missing.end(), neighbours.begin(), neighbours.end());
    if (culprit >= 0) missing = {culprit};
    std::sort(missing.begin(), missing.end());
  }
  return Timeout(plan.describe(tensor) + ": after " + std::to_string(static_cast<int>(options_.timeout_seconds)) +
                     " s not every rank has started it. Missing, as far as this rank sees: rank " + joined(missing) +
                     ". Do all ranks run the same number of steps?",
                 culprit);
}

// Of another node, whose message this rank waits for.
int Team::peer_awaited(const Plan& plan) const {
  for (int lane = 0; lane < static_cast<int>(lanes_.size()); ++lane) {
    const std::unique_lock lock(lanes_[at(lane)]->mutex, std::try_to_lock);
    const int peer = lock.owns_lock() ? plan.peer_awaited(lane) : -1;
    if (peer >= 0 && peer != topology().rank) return peer;
  }
  return -1;
}

bool Team::complete_async() {
  std::vector<AsyncWait> finished;
  {
    const std::lock_guard lock(async_mutex_);
    for (size_t i = 0; i < async_.size();) {
      AsyncWait& wait = async_[i];
      wait.tensor = wait.plan->first_incomplete(wait.tensor);
      if (wait.tensor < wait.plan->layout().tensor_count()) {
        ++i;
        continue;
      }
      finished.push_back(std::move(wait));
      async_.erase(async_.begin() + static_cast<std::ptrdiff_t>(i));
      --asynchronous_waits_;
    }
  }
  // Without the lock: the framework may go on with its step, and start the next plan, inside `done`.
  for (const AsyncWait& wait : finished) {
    if (wait.stall) wait.stall->resolve();
    for (int tensor = 0; tensor < wait.plan->layout().tensor_count(); ++tensor) wait.plan->release(tensor);
    add(exposed_seconds_, seconds_since(wait.begin));
    if (trace::enabled) trace::record(wait.plan->name(), "wait", number(), wait.begin);
    wait.done(wait.arg, nullptr);
  }
  return !finished.empty();
}

// What a thread does that waits itself. Throws if there is no use in waiting.
void Team::look_after_async() {
  const std::lock_guard lock(async_mutex_);
  for (AsyncWait& wait : async_) {
    const double left = options_.timeout_seconds - wait.time.seconds();
    if (wait.plan->is_complete(wait.tensor)) continue;
    const TensorWait awaited(*this, *wait.plan, wait.tensor, wait.begin);
    wait.lookout.look(awaited);
    const int idle = left < 0 ? wait.lookout.idle_suspect(awaited) : -1;
    if (left < 0 && (idle >= 0 || left < -wait.lookout.hearing_seconds(awaited))) {
      wait.lookout.look_at_blame(awaited);
      throw late(*wait.plan, wait.tensor, idle);
    }
    if (!wait.stall && seconds_since(wait.begin) > options_.stall_seconds)
      wait.stall = std::make_shared<Activity::Note>(activity_, awaited.stall());
  }
}

}  // namespace keras_hpc
