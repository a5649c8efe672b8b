// SPDX-License-Identifier: Apache-2.0
#include "device/nccl.hpp"

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "algorithms/kernels.hpp"
#include "device/library.hpp"

namespace keras_hpc::device {
namespace {

[[noreturn]] void raise(const NcclApi& api, Result result, const char* function) {
  throw NcclError(std::string("NCCL: ") + function + " failed: " + api.error_text(result) + ".");
}

int number_of(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return kNcclFloat16;
    case DType::bfloat16:
      return kNcclBfloat16;
    case DType::float32:
      return kNcclFloat32;
    case DType::float64:
      return kNcclFloat64;
    case DType::int32:
      return kNcclInt32;
    case DType::int64:
      return kNcclInt64;
  }
  throw Error("NCCL has no such type.");
}

}  // namespace

const NcclApi& nccl(const std::string& path) {
  static std::mutex mutex;
  static const NcclApi* found = nullptr;
  const std::lock_guard lock(mutex);
  if (found != nullptr) return *found;
  void* library = open_library("NCCL", {"libnccl.so.2"}, path);
  NcclApi api;
#define KERAS_HPC_BIND(name, symbol, type) bind_symbol(library, api.name, symbol, "NCCL", "2.11 or newer");
  KERAS_HPC_NCCL_API(KERAS_HPC_BIND)
#undef KERAS_HPC_BIND
  found = new NcclApi(api);  // never unloaded
  return *found;
}

int nccl_version() {
  int version = 0;
  const NcclApi& api = nccl();
  if (const Result result = api.version(&version); result != 0) raise(api, result, "ncclGetVersion");
  return version;
}

NcclId new_nccl_id() {
  NcclId id;
  const NcclApi& api = nccl();
  if (const Result result = api.new_id(&id); result != 0) raise(api, result, "ncclGetUniqueId");
  return id;
}

Communicator::Communicator(const Device& device, const NcclId& id, int rank, int size,
                           const std::function<void()>& look)
    : api_(nccl()), rank_(rank), size_(size) {
  struct Making {
    std::promise<Result> done;
    NcclCommHandle handle = nullptr;
    std::shared_ptr<const Device> device;
  };
  const auto making = std::make_shared<Making>();
  making->device = std::make_shared<const Device>(device.ordinal());  // the thread may outlive the plan's
  auto done = making->done.get_future();
  std::thread([making, id, rank, size] {
    try {
      const Current current(*making->device);
      making->done.set_value(nccl().init_rank(&making->handle, size, id, rank));
    } catch (const std::exception&) {
      making->done.set_exception(std::current_exception());
    }
  }).detach();
  while (done.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) look();
  check(done.get(), "ncclCommInitRank");
  handle_ = making->handle;
}

Communicator::~Communicator() {
  if (handle_ != nullptr) api_.destroy(handle_);
}

void Communicator::check(Result result, const char* function) const {
  if (result != 0) raise(api_, result, function);
}

void Communicator::all_reduce(Pointer data, size_t count, DType dtype, std::optional<double> factor,
                              StreamHandle stream) {
  auto* memory = reinterpret_cast<void*>(data);
  check(api_.all_reduce(memory, memory, count, number_of(dtype), sum_by(factor, dtype), handle_, stream),
        "ncclAllReduce");
}

void Communicator::reduce_scatter(Pointer data, size_t count_each, DType dtype, std::optional<double> factor,
                                  StreamHandle stream) {
  auto* mine = reinterpret_cast<void*>(part_of(data, count_each, dtype));
  check(api_.reduce_scatter(reinterpret_cast<void*>(data), mine, count_each, number_of(dtype), sum_by(factor, dtype),
                            handle_, stream),
        "ncclReduceScatter");
}

void Communicator::all_gather(Pointer data, size_t count_each, DType dtype, StreamHandle stream) {
  const auto* mine = reinterpret_cast<void*>(part_of(data, count_each, dtype));
  check(api_.all_gather(mine, reinterpret_cast<void*>(data), count_each, number_of(dtype), handle_, stream),
        "ncclAllGather");
}

Pointer Communicator::part_of(Pointer data, size_t count_each, DType dtype) const {
  return data + static_cast<size_t>(rank_) * count_each * size_of(dtype);
}

int Communicator::sum_by(std::optional<double> factor, DType dtype) {
  return factor ? product_by(*factor, dtype) : kNcclSum;
}

int Communicator::product_by(double factor, DType dtype) {
  const auto known = products_.find(dtype);
  if (known != products_.end()) {
    if (known->second.factor == factor) return known->second.op;
    const int op = known->second.op;
    products_.erase(known);
    check(api_.destroy_op(op, handle_), "ncclRedOpDestroy");
  }
  alignas(8) std::byte scalar[8];
  const auto number = static_cast<float>(factor);
  if (dtype == DType::float64)
    std::memcpy(scalar, &factor, sizeof factor);
  else if (dtype == DType::float32)
    std::memcpy(scalar, &number, sizeof number);
  else
    to_16_bits(dtype, &number, scalar, 1);
  int op = 0;
  check(api_.create_product(&op, scalar, number_of(dtype), kNcclScalarOnHost, handle_), "ncclRedOpCreatePreMulSum");
  products_[dtype] = {factor, op};
  return op;
}

void Communicator::throw_if_failed() {
  Result result = 0;
  check(api_.async_error(handle_, &result), "ncclCommGetAsyncError");
  if (result != kNcclInProgress) check(result, "a collective");
}

void Communicator::abort() noexcept {
  if (handle_ != nullptr) api_.abort(handle_);
  handle_ = nullptr;
}

}  // namespace keras_hpc::device
