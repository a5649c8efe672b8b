// SPDX-License-Identifier: Apache-2.0
// The part of NCCL that the engine calls, bound at run time from the library that the framework has brought along.
#pragma once
#include <cstddef>
#include <string>
#include <type_traits>

#include "device/api.hpp"

namespace keras_hpc::device {

struct NcclCommHandle_;
using NcclCommHandle = NcclCommHandle_*;
struct NcclId {
  char bytes[128];
};

// Every function: our name, NCCL's symbol, its type. A stream of the driver is one of CUDA's runtime.
#define KERAS_HPC_NCCL_API(X)                                                                                        \
  X(version, "ncclGetVersion", Result(int*))                                                                         \
  X(error_text, "ncclGetErrorString", const char*(Result))                                                           \
  X(new_id, "ncclGetUniqueId", Result(NcclId*))                                                                      \
  X(init_rank, "ncclCommInitRank", Result(NcclCommHandle*, int size, NcclId, int rank))                              \
  X(destroy, "ncclCommDestroy", Result(NcclCommHandle))                                                              \
  X(abort, "ncclCommAbort", Result(NcclCommHandle))                                                                  \
  X(async_error, "ncclCommGetAsyncError", Result(NcclCommHandle, Result*))                                           \
  X(all_reduce, "ncclAllReduce",                                                                                     \
    Result(const void* from, void* to, size_t count, int dtype, int op, NcclCommHandle, StreamHandle))               \
  X(reduce_scatter, "ncclReduceScatter",                                                                             \
    Result(const void* from, void* to, size_t count_each, int dtype, int op, NcclCommHandle, StreamHandle))          \
  X(all_gather, "ncclAllGather",                                                                                     \
    Result(const void* from, void* to, size_t count_each, int dtype, NcclCommHandle, StreamHandle))                  \
  X(create_product, "ncclRedOpCreatePreMulSum", Result(int* op, void* factor, int dtype, int where, NcclCommHandle)) \
  X(destroy_op, "ncclRedOpDestroy", Result(int op, NcclCommHandle))

struct NcclApi {
#define KERAS_HPC_DECLARE(name, symbol, type) std::add_pointer_t<type> name = nullptr;
  KERAS_HPC_NCCL_API(KERAS_HPC_DECLARE)
#undef KERAS_HPC_DECLARE
};

// Values of NCCL's enumerations.
constexpr int kNcclInt32 = 2, kNcclInt64 = 4, kNcclFloat16 = 6, kNcclFloat32 = 7, kNcclFloat64 = 8, kNcclBfloat16 = 9;
constexpr int kNcclSum = 0, kNcclScalarOnHost = 1;
constexpr Result kNcclInProgress = 7;

// The library: one that the process has loaded already, else the one at `path`, else the system's. Throws Error where
// there is none, or one that lacks a function.
const NcclApi& nccl(const std::string& path = "");

}  // namespace keras_hpc::device
