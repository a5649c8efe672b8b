// SPDX-License-Identifier: Apache-2.0
// The part of NVRTC, CUDA's compiler, that the engine calls, bound at run time from the library that the framework has
// brought along.
#pragma once
#include <cstddef>
#include <string>
#include <type_traits>

#include "device/api.hpp"

namespace keras_hpc::device {

struct NvrtcProgram_;
using NvrtcProgram = NvrtcProgram_*;

// Every function: our name, NVRTC's symbol, its type.
#define KERAS_HPC_NVRTC_API(X)                                                                   \
  X(version, "nvrtcVersion", Result(int* major, int* minor))                                     \
  X(error_text, "nvrtcGetErrorString", const char*(Result))                                      \
  X(create, "nvrtcCreateProgram",                                                                \
    Result(NvrtcProgram*, const char* source, const char* name, int, const char* const* headers, \
           const char* const* includes))                                                         \
  X(destroy, "nvrtcDestroyProgram", Result(NvrtcProgram*))                                       \
  X(compile, "nvrtcCompileProgram", Result(NvrtcProgram, int, const char* const* options))       \
  X(log_size, "nvrtcGetProgramLogSize", Result(NvrtcProgram, size_t*))                           \
  X(log, "nvrtcGetProgramLog", Result(NvrtcProgram, char*))                                      \
  X(binary_size, "nvrtcGetCUBINSize", Result(NvrtcProgram, size_t*))                             \
  X(binary, "nvrtcGetCUBIN", Result(NvrtcProgram, char*))

struct NvrtcApi {
#define KERAS_HPC_DECLARE(name, symbol, type) std::add_pointer_t<type> name = nullptr;
  KERAS_HPC_NVRTC_API(KERAS_HPC_DECLARE)
#undef KERAS_HPC_DECLARE
};

// The library: one that the process has loaded already, else the one at `path`, else the system's. Throws Error where
// there is none, or one that lacks a function.
const NvrtcApi& nvrtc(const std::string& path = "");

}  // namespace keras_hpc::device
