// SPDX-License-Identifier: Apache-2.0
// What the executions of a plan came to: counted together, so that a reader never sees a part of one.
#pragma once
#include <cstdint>
#include <mutex>

namespace keras_hpc {

struct PlanTotals {
  uint64_t executions = 0;
  uint64_t bytes = 0;  // of the tensors
  double seconds = 0;  // from the start of the first tensor until the last was reduced, as far as this rank saw
};

class Totals {
 public:
  void count(uint64_t bytes, double seconds) {
    const std::lock_guard lock(mutex_);
    totals_ = {totals_.executions + 1, totals_.bytes + bytes, totals_.seconds + seconds};
  }
  PlanTotals read() const {
    const std::lock_guard lock(mutex_);
    return totals_;
  }

 private:
  mutable std::mutex mutex_;
  PlanTotals totals_;
};

}  // namespace keras_hpc
