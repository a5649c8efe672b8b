// SPDX-License-Identifier: Apache-2.0
#include "engine/registry.hpp"

#include <chrono>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/error.hpp"

namespace keras_hpc::registry {
namespace {

// Never destroyed: at the end of the process teams stay as they are.
struct Entries {
  std::shared_mutex mutex;
  std::vector<std::shared_ptr<Team>> teams;
  std::vector<PlanEntry> plans;
  std::vector<ExchangeEntry> exchanges;
};
Entries& entries = *new Entries;
std::atomic<int> home{0};  // the fork depth of the process whose teams these are

// Before the lock: in a forked child, a thread that does not exist there may hold it.
void refuse_children() {
  if (fork_depth() != home)
    throw Error("This process was forked from a rank and is none itself: it cannot use the rank's teams.");
}

template <class Entry>
int append(std::vector<Entry>& list, Entry entry) {
  home = fork_depth();
  const std::unique_lock lock(entries.mutex);
  list.push_back(std::move(entry));
  return static_cast<int>(list.size()) - 1;
}

}  // namespace

int add(const std::shared_ptr<Team>& team) {
  return append(entries.teams, team);
}

int add(const std::shared_ptr<Team>& team, const std::shared_ptr<Plan>& plan,
        const std::shared_ptr<Pipeline>& pipeline) {
  return append(entries.plans, PlanEntry{team, plan, pipeline, nullptr, nullptr});
}

int add_exchange(const std::shared_ptr<Team>& team, int number) {
  return append(entries.exchanges, ExchangeEntry{team, number});
}

void set_local(const Plan* plan, const std::shared_ptr<LocalSteps>& local) {
  const std::unique_lock lock(entries.mutex);
  for (PlanEntry& entry : entries.plans)
    if (entry.plan.get() == plan) entry.local = local;
}

void set_device(const Plan* plan, const std::shared_ptr<DevicePlan>& device) {
  const std::unique_lock lock(entries.mutex);
  for (PlanEntry& entry : entries.plans)
    if (entry.plan.get() == plan) entry.device = device;
}

void remove(const Plan* plan) {
  const std::unique_lock lock(entries.mutex);
  for (PlanEntry& entry : entries.plans)
    if (entry.plan.get() == plan) entry = {};
}

std::shared_ptr<Team> team(int id) {
  refuse_children();
  const std::shared_lock lock(entries.mutex);
  if (id < 0 || id >= static_cast<int>(entries.teams.size()) || entries.teams[static_cast<size_t>(id)] == nullptr)
    throw Error("There is no team with id " + std::to_string(id) + ": was keras_hpc.finalize() called?");
  return entries.teams[static_cast<size_t>(id)];
}

PlanEntry plan(int id) {
  refuse_children();
  const std::shared_lock lock(entries.mutex);
  if (id < 0 || id >= static_cast<int>(entries.plans.size()) || entries.plans[static_cast<size_t>(id)].plan == nullptr)
    throw Error("There is no plan with id " + std::to_string(id) +
                ": was its optimizer deleted, or keras_hpc.finalize() called?");
  return entries.plans[static_cast<size_t>(id)];
}

ExchangeEntry exchange(int id) {
  refuse_children();
  const std::shared_lock lock(entries.mutex);
  if (id < 0 || id >= static_cast<int>(entries.exchanges.size()) ||
      entries.exchanges[static_cast<size_t>(id)].team == nullptr)
    throw Error("There is no exchange with id " + std::to_string(id) + ": was keras_hpc.finalize() called?");
  return entries.exchanges[static_cast<size_t>(id)];
}

void close(std::shared_ptr<Team>&& team) {
  constexpr double patience_seconds = 1;
  team->close();
  {
    const std::unique_lock lock(entries.mutex);
    for (auto& entry : entries.teams)
      if (entry == team) entry = nullptr;
    for (PlanEntry& entry : entries.plans)
      if (entry.team == team) entry = {};
    for (ExchangeEntry& entry : entries.exchanges)
      if (entry.team == team) entry.team = nullptr;
  }
  const std::weak_ptr<Team> rest = std::exchange(team, nullptr);
  const auto begin = Clock::now();
  while (!rest.expired() && seconds_since(begin) < patience_seconds)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace keras_hpc::registry
