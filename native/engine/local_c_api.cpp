// SPDX-License-Identifier: Apache-2.0
// The C interface of plans with local steps.
#include "engine/c_api.hpp"
#include "engine/local_steps.hpp"
#include "keras_hpc/engine.h"

using namespace keras_hpc;
using namespace keras_hpc::c_api;

namespace {

registry::PlanEntry find_local(int plan, int tensor) {
  registry::PlanEntry entry = find(plan, tensor);
  if (entry.local == nullptr) throw Error("Plan '" + entry.plan->name() + "' has no local steps.");
  return entry;
}

}  // namespace

int khpc_local_begin(int plan, double samples) {
  return guarded(
      [&] {
        expect(samples >= 0, "a number of samples >= 0");
        return find_local(plan, 0).local->begin(samples);
      },
      -1);
}

int khpc_local_anchor(int plan, int tensor, const void* weights) {
  return guarded(
      [&]() -> int {
        find_local(plan, tensor).local->set_anchor(tensor, weights);
        return KHPC_OK;
      },
      KHPC_ERROR);
}
