// SPDX-License-Identifier: Apache-2.0
#include "common/dtype.hpp"

#include "common/error.hpp"

namespace keras_hpc {
namespace {

constexpr const char* kDTypes[] = {"float16", "bfloat16", "float32", "float64", "int32", "int64"};
constexpr const char* kOps[] = {"sum", "mean", "min", "max", "product"};

template <class Enum, size_t n>
Enum parse(const char* const (&names)[n], const std::string& name, const char* what) {
  std::string known;
  for (size_t i = 0; i < n; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
    known += std::string(i ? ", " : "") + names[i];
  }
  throw Error(std::string("Unsupported ") + what + ". Expected one of " + known + ". Received: " + name);
}

}  // namespace

size_t size_of(DType dtype) {
  constexpr size_t sizes[] = {2, 2, 4, 8, 4, 8};
  return sizes[static_cast<size_t>(dtype)];
}
DType parse_dtype(const std::string& name) {
  return parse<DType>(kDTypes, name, "dtype");
}
Op parse_op(const std::string& name) {
  return parse<Op>(kOps, name, "op");
}
const char* name_of(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)];
}
const char* name_of(Op op) {
  return kOps[static_cast<size_t>(op)];
}

}  // namespace keras_hpc
