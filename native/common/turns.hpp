// SPDX-License-Identifier: Apache-2.0
// Who comes first goes first, one at a time.
#pragma once
#include <algorithm>
#include <deque>
#include <mutex>

namespace keras_hpc {

class Turns {
 public:
  // A place in the line, from now until it ends.
  class Turn {
   public:
    explicit Turn(Turns& turns) : turns_(turns) {
      const std::lock_guard lock(turns_.mutex_);
      turns_.line_.push_back(this);
    }
    ~Turn() {
      const std::lock_guard lock(turns_.mutex_);
      turns_.line_.erase(std::find(turns_.line_.begin(), turns_.line_.end(), this));
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    bool has_come() const {
      const std::lock_guard lock(turns_.mutex_);
      return turns_.line_.front() == this;
    }

   private:
    Turns& turns_;
  };

 private:
  std::mutex mutex_;
  std::deque<const Turn*> line_;
};

}  // namespace keras_hpc
