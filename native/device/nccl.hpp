// SPDX-License-Identifier: Apache-2.0
// GPUs that reduce together by NCCL, one of each rank.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "common/dtype.hpp"
#include "device/device.hpp"
#include "device/nccl_api.hpp"

namespace keras_hpc::device {

// A call of NCCL failed, or what it has begun. Nothing can be done with the communicator any more.
struct NcclError : DriverError {
  using DriverError::DriverError;
};

// Such as 23004 for 2.30.4.
int nccl_version();
// For all ranks of a communicator, from one of them.
NcclId new_nccl_id();

// Calls are in the same order on all ranks. One thread at a time.
class Communicator {
 public:
  // Collective. `look` is called again and again while it waits for the other ranks, and throws if there is no use in
  // that: then, as nothing else can end it, a thread is left behind that waits.
  Communicator(const Device& device, const NcclId& id, int rank, int size, const std::function<void()>& look);
  // Waits for the other ranks' part of what is under way, unless it was aborted.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int size() const { return size_; }
  // The sum over all ranks, in place, on the stream. Either none has a factor, or each one's values are multiplied by
  // its own first, which is rounded to the dtype.
  void all_reduce(Pointer data, size_t count, DType dtype, std::optional<double> factor, StreamHandle stream);
  // The same of `size` parts, one after the other: each rank gets its own part of the sum, and none of the others.
  void reduce_scatter(Pointer data, size_t count_each, DType dtype, std::optional<double> factor, StreamHandle stream);
  // Each rank's part, to all.
  void all_gather(Pointer data, size_t count_each, DType dtype, StreamHandle stream);
  // Where this rank's part is.
  Pointer part_of(Pointer data, size_t count_each, DType dtype) const;
  // Throws NcclError if something that is under way has failed.
  void throw_if_failed();
  // Ends what is under way, on this rank: its results are worth nothing.
  void abort() noexcept;

 private:
  void check(Result result, const char* function) const;
  int sum_by(std::optional<double> factor, DType dtype);
  int product_by(double factor, DType dtype);

  struct Product {
    double factor;
    int op;
  };
  const NcclApi& api_;
  const int rank_, size_;
  NcclCommHandle handle_ = nullptr;
  std::map<DType, Product> products_;
};

}  // namespace keras_hpc::device
