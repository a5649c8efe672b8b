// SPDX-License-Identifier: Apache-2.0
#include "device/loans.hpp"

#include <algorithm>

#include "common/index.hpp"

namespace keras_hpc::device {

Loans::Loans(int ordinal, const std::vector<size_t>& sizes) : ordinal_(ordinal), is_lent_(sizes.size()) {
  constexpr size_t alignment = 256;
  for (const size_t nbytes : sizes) {
    begins_.push_back(nbytes_);
    nbytes_ += std::max<size_t>(1, (nbytes + alignment - 1) / alignment) * alignment;
  }
}

Loan Loans::lend(int tensor) {
  if (of_step_ == nullptr || is_lent_[at(tensor)]) {  // where a step was given up, the next one begins
    of_step_.reset();
    of_step_ = free_memory();
    is_lent_.assign(is_lent_.size(), false);
  }
  is_lent_[at(tensor)] = true;
  const Loan loan{of_step_->data() + begins_[at(tensor)], of_step_};
  if (std::all_of(is_lent_.begin(), is_lent_.end(), [](bool is) { return is; })) of_step_.reset();
  return loan;
}

std::shared_ptr<const Buffer> Loans::free_memory() {
  const auto found = std::find_if(all_.begin(), all_.end(), [](const auto& memory) { return memory.use_count() == 1; });
  const auto& memory =
      found != all_.end() ? *found : all_.emplace_back(std::make_shared<const Memory>(ordinal_, nbytes_));
  return {memory, &memory->buffer};
}

}  // namespace keras_hpc::device
