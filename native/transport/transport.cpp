// SPDX-License-Identifier: Apache-2.0
#include "transport/transport.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "common/error.hpp"
#include "common/waiting.hpp"

namespace keras_hpc {

void finish(RequestPtr request, double timeout_seconds, const char* what) {
  const auto begin = Clock::now();
  auto nap = std::chrono::microseconds(1);
  while (!request->test()) {
    if (seconds_since(begin) > timeout_seconds) {
      static_cast<void>(request.release());  // MPI still refers to it, and the job is ending
      throw Timeout("Waited " + std::to_string(static_cast<int>(timeout_seconds)) + " s for the other ranks in " + what +
                    ": not every rank arrived.");
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, std::chrono::microseconds(200));
  }
}

}  // namespace keras_hpc
