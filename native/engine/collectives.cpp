// SPDX-License-Identifier: Apache-2.0
// What ranks of a team tell each other beside gradients.
#include <algorithm>
#include <cstring>
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

void Team::alltoall(const void* in, const std::vector<size_t>& to, void* out, const std::vector<size_t>& from) {
  constexpr int tag = 1;
  constexpr size_t part = size_t{1} << 28;  // MPI's counts are 32-bit integers
  const std::lock_guard lock(control_mutex_);
  const auto* source = static_cast<const std::byte*>(in);
  auto* target = static_cast<std::byte*>(out);
  std::vector<RequestPtr> requests;
  for (size_t r = 0; r < to.size(); ++r) {
    const auto peer = static_cast<int>(r);
    if (peer == topology().rank) {
      if (to[r] > 0) std::memcpy(target, source, to[r]);
    } else {
      for (size_t begin = 0; begin < from[r]; begin += part)
        requests.push_back(control_->receive(target + begin, std::min(part, from[r] - begin), peer, tag));
      for (size_t begin = 0; begin < to[r]; begin += part)
        requests.push_back(control_->send(source + begin, std::min(part, to[r] - begin), peer, tag));
    }
    source += to[r];
    target += from[r];
  }
  for (RequestPtr& request : requests) finish(std::move(request), "alltoall");
}

void Team::barrier() {
  // Once it is there, ranks meet in shared memory, and see there what another one does instead.
  if (allreduce_) return topology().size == 1 ? void() : meet("\nbarrier", "barrier");
  const std::lock_guard lock(control_mutex_);
  finish(control_->barrier(), "barrier");
}

}  // namespace keras_hpc
