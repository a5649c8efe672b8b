// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "bindings/python.hpp"

namespace keras_hpc {

void bind_transports(nb::module_& m);

}  // namespace keras_hpc
