// SPDX-License-Identifier: Apache-2.0
// The part of a GPU's driver that the engine calls, bound at run time: nothing of CUDA is needed to build, and one
// binary serves machines with and without a GPU.
//
// Names are neutral. cuda.cpp binds CUDA's driver API, whose context is the one that TensorFlow, JAX and PyTorch use;
// AMD's HIP would be another table.
#pragma once
#include <cstddef>
#include <type_traits>

namespace keras_hpc::device {

using Result = int;  // 0: success
using Pointer = unsigned long long;
struct ContextHandle_;
struct StreamHandle_;
struct EventHandle_;
struct ModuleHandle_;
struct FunctionHandle_;
using ContextHandle = ContextHandle_*;
using StreamHandle = StreamHandle_*;  // null: the default stream
using EventHandle = EventHandle_*;
using ModuleHandle = ModuleHandle_*;
using FunctionHandle = FunctionHandle_*;
struct Uuid {
  unsigned char bytes[16];
};
struct MemoryHandle {  // by which another process finds memory
  char bytes[64];
};

// Every function: our name, CUDA's symbol, its type. The symbols are those that the macros of cuda.h name.
#define KERAS_HPC_DEVICE_API(X)                                                                                       \
  X(initialize, "cuInit", Result(unsigned flags))                                                                     \
  X(version, "cuDriverGetVersion", Result(int*))                                                                      \
  X(error_name, "cuGetErrorName", Result(Result, const char**))                                                       \
  X(count, "cuDeviceGetCount", Result(int*))                                                                          \
  X(get, "cuDeviceGet", Result(int* device, int ordinal))                                                             \
  X(name, "cuDeviceGetName", Result(char*, int length, int device))                                                   \
  X(uuid, "cuDeviceGetUuid_v2", Result(Uuid*, int device))                                                            \
  X(bus_id, "cuDeviceGetPCIBusId", Result(char*, int length, int device))                                             \
  X(device_attribute, "cuDeviceGetAttribute", Result(int*, int attribute, int device))                                \
  X(retain_context, "cuDevicePrimaryCtxRetain", Result(ContextHandle*, int device))                                   \
  X(release_context, "cuDevicePrimaryCtxRelease_v2", Result(int device))                                              \
  X(push_context, "cuCtxPushCurrent_v2", Result(ContextHandle))                                                       \
  X(pop_context, "cuCtxPopCurrent_v2", Result(ContextHandle*))                                                        \
  X(create_stream, "cuStreamCreateWithPriority", Result(StreamHandle*, unsigned flags, int priority))                 \
  X(destroy_stream, "cuStreamDestroy_v2", Result(StreamHandle))                                                       \
  X(query_stream, "cuStreamQuery", Result(StreamHandle))                                                              \
  X(make_stream_wait, "cuStreamWaitEvent", Result(StreamHandle, EventHandle, unsigned flags))                         \
  X(create_event, "cuEventCreate", Result(EventHandle*, unsigned flags))                                              \
  X(destroy_event, "cuEventDestroy_v2", Result(EventHandle))                                                          \
  X(record_event, "cuEventRecord", Result(EventHandle, StreamHandle))                                                 \
  X(query_event, "cuEventQuery", Result(EventHandle))                                                                 \
  X(allocate, "cuMemAlloc_v2", Result(Pointer*, size_t))                                                              \
  X(free, "cuMemFree_v2", Result(Pointer))                                                                            \
  X(pin, "cuMemHostRegister_v2", Result(void*, size_t, unsigned flags))                                               \
  X(unpin, "cuMemHostUnregister", Result(void*))                                                                      \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", Result(void* to, Pointer from, size_t, StreamHandle))                       \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", Result(Pointer to, const void* from, size_t, StreamHandle))               \
  X(copy_within, "cuMemcpyDtoDAsync_v2", Result(Pointer to, Pointer from, size_t, StreamHandle))                      \
  X(set_words, "cuMemsetD32Async", Result(Pointer, unsigned value, size_t count, StreamHandle))                       \
  X(pointer_attribute, "cuPointerGetAttribute", Result(void*, int attribute, Pointer))                                \
  X(export_memory, "cuIpcGetMemHandle", Result(MemoryHandle*, Pointer))                                               \
  X(open_memory, "cuIpcOpenMemHandle_v2", Result(Pointer*, MemoryHandle, unsigned flags))                             \
  X(close_memory, "cuIpcCloseMemHandle", Result(Pointer))                                                             \
  X(load_module, "cuModuleLoadData", Result(ModuleHandle*, const void*))                                              \
  X(unload_module, "cuModuleUnload", Result(ModuleHandle))                                                            \
  X(find_function, "cuModuleGetFunction", Result(FunctionHandle*, ModuleHandle, const char*))                         \
  X(launch, "cuLaunchKernel",                                                                                         \
    Result(FunctionHandle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, StreamHandle, \
           void** parameters, void** more))

struct Api {
#define KERAS_HPC_DECLARE(name, symbol, type) std::add_pointer_t<type> name = nullptr;
  KERAS_HPC_DEVICE_API(KERAS_HPC_DECLARE)
#undef KERAS_HPC_DECLARE
};

// Values of CUDA's enumerations.
constexpr Result kInvalidValue = 1, kNotReady = 600;
constexpr unsigned kNonBlockingStream = 1, kNoTiming = 2, kPortable = 1;
constexpr int kMemoryType = 2, kDeviceOrdinal = 9;
constexpr unsigned kDeviceMemory = 2;
constexpr int kMultiprocessors = 16, kMajorCapability = 75, kMinorCapability = 76;
constexpr unsigned kLazyPeerAccess = 1;

// The driver, initialized; null where this machine has none. Throws Error where it is too old or cannot start.
const Api* driver();

}  // namespace keras_hpc::device
