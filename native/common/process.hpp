// SPDX-License-Identifier: Apache-2.0
// Processes of this node: whether one has ended, and whether this one was forked from a rank.
#pragma once
#include <cstdint>

namespace keras_hpc {

// How a rank's process can be found by the others of its node.
struct ProcessId {
  int32_t pid = 0;
  uint64_t name_space = 0;  // in which the number means it: containers have their own

  static ProcessId mine();
};

// Whether the process has ended, as far as this one can see. A number that was given to another process, and one of
// another name space, count as alive: this errs on the side of waiting.
bool has_ended(const ProcessId& process);

// How many forks lie between the process that loaded the engine and this one. A team belongs to the process that made
// it: a child has neither its threads nor a place among the ranks.
int fork_depth();

}  // namespace keras_hpc
