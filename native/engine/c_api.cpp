// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "engine/registry.hpp"
#include "keras_hpc/engine.h"

namespace keras_hpc {
namespace {

thread_local std::string last_error;

// No exception leaves the C interface.
template <class F>
auto guarded(F&& f, decltype(f()) on_error) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& e) {
    last_error = e.what();
    return on_error;
  }
}

registry::PlanEntry find(int plan, int tensor) {
  const registry::PlanEntry entry = registry::plan(plan);
  if (tensor < 0 || tensor >= entry.plan->layout().tensor_count())
    throw Error("Plan '" + entry.plan->name() + "' has no tensor number " + std::to_string(tensor) + ".");
  return entry;
}

}  // namespace
}  // namespace keras_hpc

using namespace keras_hpc;

int khpc_start(int plan, int tensor, void* data, double weight) {
  return guarded(
      [&]() -> int {
        const auto entry = find(plan, tensor);
        entry.team->start(*entry.plan, tensor, data, weight);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_wait(int plan, int tensor) {
  return guarded(
      [&]() -> int {
        const auto entry = find(plan, tensor);
        entry.team->wait(*entry.plan, tensor);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_wait_all_async(int plan, void (*done)(void* arg, const char* error), void* arg) {
  return guarded(
      [&]() -> int {
        const auto entry = find(plan, 0);
        return entry.team->wait_all_async(*entry.plan, done, arg) ? KHPC_OK : KHPC_BLOCKING;
      },
      KHPC_ERROR);
}

int khpc_plan_tensors(int plan) {
  return guarded([&] { return find(plan, 0).plan->layout().tensor_count(); }, -1);
}

int64_t khpc_plan_nbytes(int plan, int tensor) {
  return guarded(
      [&]() -> int64_t { return static_cast<int64_t>(find(plan, tensor).plan->layout().range(tensor).size()); },
      int64_t{-1});
}

int khpc_allgather_counts(int team, int64_t mine, int64_t* counts) {
  return guarded(
      [&]() -> int {
        const std::vector<int64_t> all = registry::team(team).allgather_count(mine);
        std::copy(all.begin(), all.end(), counts);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_allgatherv(int team, const void* in, int64_t nbytes, void* out, const int64_t* nbytes_by_rank) {
  return guarded(
      [&]() -> int {
        Team& t = registry::team(team);
        const std::vector<size_t> counts(nbytes_by_rank, nbytes_by_rank + t.topology().size);
        if (static_cast<int64_t>(counts[static_cast<size_t>(t.topology().rank)]) != nbytes)
          throw Error("khpc_allgatherv: nbytes is not this rank's entry of nbytes_by_rank.");
        t.allgather(in, out, counts);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_team_size(int team) {
  return guarded([&] { return registry::team(team).topology().size; }, -1);
}

const char* khpc_last_error(void) {
  return last_error.c_str();
}
