// SPDX-License-Identifier: Apache-2.0
#include "transport/transport.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "common/error.hpp"
#include "common/waiting.hpp"

namespace keras_hpc {

void finish(RequestPtr request, double timeout_seconds, const char* what, const std::function<bool()>& abandoned) {
  // A rank may leave as soon as its own part is done; what it sent before then arrives within this time.
  constexpr double grace_seconds = 2;
  const auto begin = Clock::now();
  double limit = timeout_seconds;
  bool is_abandoned = false;
  auto nap = std::chrono::microseconds(1);
  while (!request->test()) {
    const double waited = seconds_since(begin);
    if (waited > limit) {
      static_cast<void>(request.release());  // MPI still refers to it, and the job is ending
      const std::string in = std::string(" for the other ranks in ") + what;
      if (is_abandoned)
        throw Error("Waited" + in +
                    ", but one has already left the job (it called finalize or reached the end of its " +
                    "script). Do all ranks make the same calls?");
      throw Timeout("Waited " + std::to_string(static_cast<int>(timeout_seconds)) + " s" + in +
                    ": not every rank arrived.");
    }
    if (!is_abandoned && abandoned && abandoned()) {
      is_abandoned = true;
      limit = std::min(limit, waited + grace_seconds);
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, std::chrono::microseconds(200));
  }
}

}  // namespace keras_hpc
