// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "bindings/plan.hpp"
#include "bindings/python.hpp"

namespace keras_hpc {

// Adds what a plan of weights with local steps can do.
void bind_local_steps(nb::class_<PyPlan>& plan);

}  // namespace keras_hpc
