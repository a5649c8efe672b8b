// SPDX-License-Identifier: Apache-2.0
// A condition variable in the place of std::condition_variable, of which newer libraries have newer versions only: time
// limits take glibc 2.30 (pthread_cond_clockwait), and wait() takes GCC 12's libstdc++. This one runs with older ones.
#pragma once
#include <pthread.h>
#include <time.h>

#include <cerrno>
#include <chrono>
#include <mutex>

namespace keras_hpc {

class Condition {
 public:
  Condition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);  // which nobody sets
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~Condition() { pthread_cond_destroy(&condition_); }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  void notify_one() { pthread_cond_signal(&condition_); }
  void notify_all() { pthread_cond_broadcast(&condition_); }

  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready&& ready) {
    while (!ready()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }

  // Returns what `ready` says at the end.
  template <class Ready>
  bool wait_for(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds time, Ready&& ready) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const auto end = std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec) + time;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(end);
    const timespec limit{static_cast<time_t>(seconds.count()), static_cast<long>((end - seconds).count())};
    while (!ready())
      if (pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &limit) == ETIMEDOUT) return ready();
    return true;
  }

 private:
  pthread_cond_t condition_;
};

}  // namespace keras_hpc
