// SPDX-License-Identifier: Apache-2.0
// The plans that a lane has to look at: those of which an execution has begun and is not over. Others cost nothing.
#pragma once
#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace keras_hpc {

class Plan;

class ActivePlans {
 public:
  // From any thread, when an execution begins, before anything of it can be done.
  void add(Plan* plan) {
    const std::lock_guard lock(mutex_);
    new_.push_back(plan);
    has_new_.store(true, std::memory_order_release);
  }

  // The rest is for who holds the lane.
  const std::vector<Plan*>& all() {
    if (has_new_.load(std::memory_order_acquire)) {
      const std::lock_guard lock(mutex_);
      has_new_.store(false, std::memory_order_relaxed);
      for (Plan* plan : new_)
        if (std::find(plans_.begin(), plans_.end(), plan) == plans_.end()) plans_.push_back(plan);
      new_.clear();
    }
    return plans_;
  }

  template <class IsOver>
  void remove_if(IsOver&& is_over) {
    plans_.erase(std::remove_if(plans_.begin(), plans_.end(), is_over), plans_.end());
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> has_new_{false};
  std::vector<Plan*> new_;
  std::vector<Plan*> plans_;
};

}  // namespace keras_hpc
