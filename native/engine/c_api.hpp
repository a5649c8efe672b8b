// SPDX-License-Identifier: Apache-2.0
// What the functions of the C interface have in common.
#pragma once
#include <exception>
#include <string>

#include "common/error.hpp"
#include "engine/registry.hpp"

namespace keras_hpc::c_api {

inline thread_local std::string last_error;

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

// The caller may be C: what it gives is looked at before it is used.
inline void expect(bool right, const char* expected) {
  if (!right) throw Error(std::string("An argument is not as the engine wants it. Expected ") + expected + ".");
}

inline std::string text(const char* argument, const char* name) {
  if (argument == nullptr) throw Error(std::string("Expected text. Received: a null pointer for ") + name + ".");
  return argument;
}

inline registry::PlanEntry find(int plan, int tensor) {
  registry::PlanEntry entry = registry::plan(plan);
  if (tensor < 0 || tensor >= entry.plan->layout().tensor_count())
    throw Error("Plan '" + entry.plan->name() + "' has no tensor number " + std::to_string(tensor) + ".");
  return entry;
}

}  // namespace keras_hpc::c_api
