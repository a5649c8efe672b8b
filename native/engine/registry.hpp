// SPDX-License-Identifier: Apache-2.0
// Plans and teams by number: what a framework's operations, which can hold only integers, refer to.
#pragma once
#include "engine/team.hpp"

namespace keras_hpc::registry {

struct PlanEntry {
  Team* team = nullptr;
  Plan* plan = nullptr;
  Pipeline* pipeline = nullptr;  // null: steps are synchronous
};

int add(Team* team);
int add(Team* team, Plan* plan, Pipeline* pipeline = nullptr);
// Forgets the team and its plans.
void remove(Team* team);
void remove(Plan* plan);
// Throw Error if there is none.
Team& team(int id);
PlanEntry plan(int id);

}  // namespace keras_hpc::registry
