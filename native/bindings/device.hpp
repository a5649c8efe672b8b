// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "bindings/plan.hpp"
#include "bindings/python.hpp"

namespace keras_hpc {

// Adds what a plan with tensors on a GPU can do.
void bind_device(nb::module_& m, nb::class_<PyPlan>& plan);

}  // namespace keras_hpc
