// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <string>

#include "common/error.hpp"
#include "device/api.hpp"
#include "device/library.hpp"

namespace keras_hpc::device {

const Api* driver() {
  static std::mutex mutex;
  static const Api* found = nullptr;
  const std::lock_guard lock(mutex);
  if (found != nullptr) return found;
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  Api api;
#define KERAS_HPC_BIND(name, symbol, type) \
  bind_symbol(library, api.name, symbol, "The CUDA driver of this machine", "one for CUDA 11.4 or newer");
  KERAS_HPC_DEVICE_API(KERAS_HPC_BIND)
#undef KERAS_HPC_BIND
  if (const Result result = api.initialize(0); result != 0) {
    const char* name = nullptr;
    api.error_name(result, &name);
    throw Error(std::string("The CUDA driver does not start (cuInit): ") + (name == nullptr ? "unknown error" : name));
  }
  found = new Api(api);  // never unloaded
  return found;
}

}  // namespace keras_hpc::device
