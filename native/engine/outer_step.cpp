// SPDX-License-Identifier: Apache-2.0
#include "engine/outer_step.hpp"

#include <cstring>

#include "common/error.hpp"

namespace keras_hpc {
namespace {

template <class T>
void step(T* mean, T* anchor, T* velocity, T rate, T momentum, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const T moved = anchor[i] - mean[i];
    velocity[i] = momentum * velocity[i] + moved;
    anchor[i] -= rate * (moved + momentum * velocity[i]);
    mean[i] = anchor[i];
  }
}

}  // namespace

OuterStep::OuterStep(double rate, double momentum, DType dtype, size_t nbytes)
    : rate_(rate), momentum_(momentum), dtype_(dtype), anchor_(nbytes), velocity_(nbytes) {
  if (dtype != DType::float32 && dtype != DType::float64)
    throw Error(std::string("An outer optimizer needs weights of float32 or float64. Received: ") + name_of(dtype));
}

void OuterStep::set_anchor(const void* weights) {
  std::memcpy(anchor_.data(), weights, anchor_.size());
}

void OuterStep::apply(void* mean) {
  if (dtype_ == DType::float32)
    step(static_cast<float*>(mean), reinterpret_cast<float*>(anchor_.data()),
         reinterpret_cast<float*>(velocity_.data()), static_cast<float>(rate_), static_cast<float>(momentum_),
         anchor_.size() / sizeof(float));
  else
    step(static_cast<double*>(mean), reinterpret_cast<double*>(anchor_.data()),
         reinterpret_cast<double*>(velocity_.data()), rate_, momentum_, anchor_.size() / sizeof(double));
}

}  // namespace keras_hpc
