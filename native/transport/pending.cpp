// SPDX-License-Identifier: Apache-2.0
#include "transport/pending.hpp"

#include <algorithm>
#include <mutex>

namespace keras_hpc {
namespace {

struct Abandoned {
  std::vector<std::pair<int, RequestPtr>> requests;
  std::shared_ptr<void> memory;
};

// Never destroyed: what is left at the end of the process stays as it is.
std::mutex& mutex = *new std::mutex;
std::vector<Abandoned>& abandoned = *new std::vector<Abandoned>;

}  // namespace

Pending::~Pending() {
  if (requests_.empty()) return;
  const std::lock_guard lock(mutex);
  abandoned.push_back({std::move(requests_), std::move(memory_)});
}

void Pending::cancel() {
  const auto is_over = [](auto& one) {
    try {
      return one.second->cancel();
    } catch (const Error&) {  // MPI may still use the memory
      return false;
    }
  };
  requests_.erase(std::remove_if(requests_.begin(), requests_.end(), is_over), requests_.end());
}

void Pending::free_finished() {
  const auto has_finished = [](Abandoned& old) {
    try {
      while (!old.requests.empty() && old.requests.back().second->test()) old.requests.pop_back();
    } catch (const Error&) {  // nobody wants to know any more, but MPI may still use the memory
      return false;
    }
    return old.requests.empty();
  };
  const std::lock_guard lock(mutex);
  abandoned.erase(std::remove_if(abandoned.begin(), abandoned.end(), has_finished), abandoned.end());
}

}  // namespace keras_hpc
