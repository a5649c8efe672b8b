// SPDX-License-Identifier: Apache-2.0
// Says so when a call takes long that nobody can interrupt, and ends the process when it takes too long.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace keras_hpc {

class Late {
 public:
  // After `stall_seconds` it writes `report` to stderr, after `timeout_seconds` the `end`, and leaves with status 1.
  Late(double stall_seconds, double timeout_seconds, std::string report, std::string end);
  Late(const Late&) = delete;
  Late& operator=(const Late&) = delete;
  ~Late() { stop(); }

  // The call has returned.
  void stop();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool returned_ = false;
  std::thread thread_;
};

}  // namespace keras_hpc
