// SPDX-License-Identifier: Apache-2.0
// The outer optimizer of local SGD: SGD with Nesterov momentum on what a period of local steps has changed on average,
// as in DiLoCo (Douillard et al. 2023, arXiv:2311.08105).
//
// a are the weights at the period's start, m the mean of the ranks' weights at its end, v the velocity, 0 at first:
//   d = a - m,  v = momentum v + d,  new weights = a - rate (d + momentum v)
// With rate 1 and momentum 0 they are the mean.
#pragma once
#include <cstddef>
#include <vector>

#include "common/dtype.hpp"

namespace keras_hpc {

class OuterStep {
 public:
  // float32 or float64.
  OuterStep(double rate, double momentum, DType dtype, size_t nbytes);

  void set_anchor(const void* weights);
  // Puts the new weights into the place of the mean; they are the next anchor.
  void apply(void* mean);

  std::vector<std::byte>& anchor() { return anchor_; }
  std::vector<std::byte>& velocity() { return velocity_; }

 private:
  const double rate_, momentum_;
  const DType dtype_;
  std::vector<std::byte> anchor_, velocity_;
};

}  // namespace keras_hpc
