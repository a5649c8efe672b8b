// SPDX-License-Identifier: Apache-2.0
#include "engine/activity.hpp"

#include <utility>

namespace keras_hpc {
namespace {

// Where nobody asks, they do not pile up.
constexpr size_t kResolved = 64;

}  // namespace

Activity::Note::Note(Activity& activity, Stall stall) : activity_(activity) {
  const std::lock_guard lock(activity_.mutex_);
  place_ = activity_.waits_.insert(activity_.waits_.end(), std::move(stall));
}

Activity::Note::~Note() {
  const std::lock_guard lock(activity_.mutex_);
  if (resolved_ && activity_.resolved_.size() < kResolved && seconds_since(place_->since) > activity_.stall_seconds_) {
    place_->missing = nullptr;  // it refers to what ends now
    activity_.resolved_.push_back(std::move(*place_));
  }
  activity_.waits_.erase(place_);
}

void Activity::for_each_stall(const std::function<void(const Stall&)>& f) const {
  const std::lock_guard lock(mutex_);
  for (const Stall& stall : waits_)
    if (seconds_since(stall.since) > stall_seconds_) f(stall);
}

std::vector<Stall> Activity::take_resolved() {
  const std::lock_guard lock(mutex_);
  return std::exchange(resolved_, {});
}

}  // namespace keras_hpc
