// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "bindings/team.hpp"

namespace keras_hpc {

void bind_exchange(nb::module_& m);

}  // namespace keras_hpc
