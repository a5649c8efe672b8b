// SPDX-License-Identifier: Apache-2.0
// What can be reduced, and how.
#pragma once
#include <cstddef>
#include <string>

namespace keras_hpc {

enum class DType { float16, bfloat16, float32, float64, int32, int64 };
enum class Op { sum, mean, min, max, product };

size_t size_of(DType dtype);
DType parse_dtype(const std::string& name);  // "float32", ...
Op parse_op(const std::string& name);        // "sum", ...
const char* name_of(DType dtype);
const char* name_of(Op op);

}  // namespace keras_hpc
