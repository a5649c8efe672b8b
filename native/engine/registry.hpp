// SPDX-License-Identifier: Apache-2.0
// Plans and teams by number: what a framework's operations, which can hold only integers, refer to.
//
// Whoever has found one holds it: it stays until the call is over, also when another thread closes the team meanwhile.
#pragma once
#include <memory>

#include "engine/team.hpp"

namespace keras_hpc {
class DevicePlan;
}

namespace keras_hpc::registry {

struct PlanEntry {
  std::shared_ptr<Team> team;
  std::shared_ptr<Plan> plan;
  std::shared_ptr<Pipeline> pipeline;  // null: steps are synchronous
  std::shared_ptr<DevicePlan> device;  // null: its tensors are on the host
  std::shared_ptr<LocalSteps> local;   // null: it has no local steps
};

struct ExchangeEntry {
  std::shared_ptr<Team> team;
  int number;
};

int add(const std::shared_ptr<Team>& team);
int add_exchange(const std::shared_ptr<Team>& team, int number);
int add(const std::shared_ptr<Team>& team, const std::shared_ptr<Plan>& plan,
        const std::shared_ptr<Pipeline>& pipeline = nullptr);
void set_local(const Plan* plan, const std::shared_ptr<LocalSteps>& local);
void set_device(const Plan* plan, const std::shared_ptr<DevicePlan>& device);
// Forgets the plan.
void remove(const Plan* plan);
// Throw Error if there is none, or if this process was forked from the one that has it.
std::shared_ptr<Team> team(int id);
PlanEntry plan(int id);
ExchangeEntry exchange(int id);

// Closes the team, forgets it and its plans, and waits until nobody holds it any more, about a second at most.
void close(std::shared_ptr<Team>&& team);

}  // namespace keras_hpc::registry
