// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdexcept>
#include <string>

namespace keras_hpc {

// Any failure of communication. The job cannot go on after it.
struct Error : std::runtime_error {
  // `culprit`: the rank of the team that this one waited for, or heard of; -1: the error is this rank's own.
  explicit Error(const std::string& text, int culprit = -1) : std::runtime_error(text), culprit(culprit) {}
  int culprit;
};

// The network says that something went wrong, seldom what. It may be that another rank has died.
struct NetworkError : Error {
  using Error::Error;
};

// Ranks disagree on what they are about to communicate.
struct PlanMismatch : Error {
  using Error::Error;
};

// A rank waited longer than the time limit for others.
struct Timeout : Error {
  using Error::Error;
};

// The thread that waits was asked to give up, as by Ctrl-C.
struct Interrupted : Error {
  using Error::Error;
};

}  // namespace keras_hpc
