// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace keras_hpc {

class Plan;

// What works for a plan with a thread of its own, and ends with it or with the team.
class Attendant {
 public:
  virtual ~Attendant() = default;
  virtual bool is_of(const Plan& plan) const = 0;
  // When it returns, its thread has ended and touches nothing of the plan or its callers. Whoever waits gets an error.
  virtual void stop() = 0;
};

}  // namespace keras_hpc
