// SPDX-License-Identifier: Apache-2.0
// What ranks of a team tell each other beside gradients.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {

void Team::finish(RequestPtr request, const char* what) {
  const uint64_t number = ++activity_.collectives;
  const auto begin = Clock::now();
  std::optional<Activity::Note> note;
  const auto look = [&] {
    if (!note && seconds_since(begin) > options_.stall_seconds)
      note.emplace(activity_, Stall{"collective", number, what, -1, nullptr, begin});
    return context_.first_with(Fate::left) >= 0;
  };
  keras_hpc::finish(std::move(request), options_.timeout_seconds, what, look);
  if (note) note->resolve();
}

void Team::broadcast(void* data, size_t nbytes, int root) {
  if (root < 0 || root >= topology().size)
    throw Error("Expected a root from 0 to " + std::to_string(topology().size - 1) +
                ". Received: " + std::to_string(root));
  const std::lock_guard lock(control_mutex_);
  finish(control_->broadcast(data, nbytes, root), "broadcast");
}

void Team::allgather(const void* in, void* out, const std::vector<size_t>& nbytes_by_rank) {
  const std::lock_guard lock(control_mutex_);
  finish(control_->allgather(in, out, nbytes_by_rank), "allgather");
}

std::vector<int64_t> Team::allgather_count(int64_t mine) {
  std::vector<int64_t> counts(at(topology().size));
  allgather(&mine, counts.data(), std::vector<size_t>(counts.size(), sizeof mine));
  return counts;
}

void Team::barrier() {
  const std::lock_guard lock(control_mutex_);
  finish(control_->barrier(), "barrier");
}

}  // namespace keras_hpc
