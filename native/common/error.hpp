// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdexcept>

namespace keras_hpc {

// Any failure of communication. The job cannot go on after it.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Ranks disagree on what they are about to communicate.
struct PlanMismatch : Error {
  using Error::Error;
};

// A rank waited longer than the time limit for others.
struct Timeout : Error {
  using Error::Error;
};

}  // namespace keras_hpc
