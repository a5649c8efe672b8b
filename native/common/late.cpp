// SPDX-License-Identifier: Apache-2.0
#include "common/late.hpp"

#include <unistd.h>

#include <chrono>
#include <utility>

namespace keras_hpc {

namespace {

void write_line(const std::string& text) {
  const std::string line = text.empty() ? text : text + "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

Late::Late(double stall_seconds, double timeout_seconds, std::string report, std::string end) {
  const auto begin = std::chrono::steady_clock::now();
  const auto after = [begin](double seconds) {
    return begin +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  };
  const auto first = after(stall_seconds < timeout_seconds ? stall_seconds : timeout_seconds);
  const auto last = after(timeout_seconds);
  thread_ = std::thread([this, first, last, report = std::move(report), end = std::move(end)] {
    std::unique_lock lock(mutex_);
    const auto returned = [this] { return returned_; };
    if (changed_.wait_until(lock, first, returned)) return;
    write_line(report);
    if (changed_.wait_until(lock, last, returned)) return;
    write_line(end);
    ::_exit(1);
  });
}

void Late::stop() {
  {
    const std::lock_guard lock(mutex_);
    returned_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace keras_hpc
