// SPDX-License-Identifier: Apache-2.0
// Memory of the device for a plan's tensors, lent to a framework that shows no streams: from the start of a tensor on,
// and with its mean once the step is over, until the framework gives it back.
#pragma once
#include <memory>
#include <vector>

#include "device/device.hpp"

namespace keras_hpc::device {

struct Loan {
  Pointer data;                          // aligned as frameworks want it
  std::shared_ptr<const Buffer> memory;  // which lives as long as the pointer
};

class Loans {
 public:
  // Bytes of each tensor.
  Loans(int ordinal, const std::vector<size_t>& sizes);

  // The same place in each step, unless something of the step before has not been given back. Throws DriverError.
  Loan lend(int tensor);

 private:
  struct Memory {
    Memory(int ordinal, size_t nbytes) : device(ordinal), buffer(device, nbytes) {}
    const Device device;
    const Buffer buffer;
  };
  std::shared_ptr<const Buffer> free_memory();

  const int ordinal_;
  std::vector<size_t> begins_;  // [tensor]
  size_t nbytes_ = 0;
  std::vector<std::shared_ptr<const Memory>> all_;
  std::shared_ptr<const Buffer> of_step_;  // null: between steps
  std::vector<bool> is_lent_;              // [tensor] in this step
};

}  // namespace keras_hpc::device
