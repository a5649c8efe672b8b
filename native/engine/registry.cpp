// SPDX-License-Identifier: Apache-2.0
#include "engine/registry.hpp"

#include <mutex>
#include <shared_mutex>
#include <vector>

#include "common/error.hpp"

namespace keras_hpc::registry {
namespace {

std::shared_mutex mutex;
std::vector<Team*> teams;
std::vector<PlanEntry> plans;

}  // namespace

int add(Team* team) {
  const std::unique_lock lock(mutex);
  teams.push_back(team);
  return static_cast<int>(teams.size()) - 1;
}

int add(Team* team, Plan* plan, Pipeline* pipeline) {
  const std::unique_lock lock(mutex);
  plans.push_back({team, plan, pipeline});
  return static_cast<int>(plans.size()) - 1;
}

void remove(Team* team) {
  const std::unique_lock lock(mutex);
  for (Team*& t : teams)
    if (t == team) t = nullptr;
  for (PlanEntry& entry : plans)
    if (entry.team == team) entry = {};
}

void remove(Plan* plan) {
  const std::unique_lock lock(mutex);
  for (PlanEntry& entry : plans)
    if (entry.plan == plan) entry = {};
}

Team& team(int id) {
  const std::shared_lock lock(mutex);
  if (id < 0 || id >= static_cast<int>(teams.size()) || teams[static_cast<size_t>(id)] == nullptr)
    throw Error("There is no team with id " + std::to_string(id) + ": was keras_hpc.finalize() called?");
  return *teams[static_cast<size_t>(id)];
}

PlanEntry plan(int id) {
  const std::shared_lock lock(mutex);
  if (id < 0 || id >= static_cast<int>(plans.size()) || plans[static_cast<size_t>(id)].plan == nullptr)
    throw Error("There is no plan with id " + std::to_string(id) +
                ": was its optimizer deleted, or keras_hpc.finalize() called?");
  return plans[static_cast<size_t>(id)];
}

}  // namespace keras_hpc::registry
