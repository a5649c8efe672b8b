// SPDX-License-Identifier: Apache-2.0
// What JAX's handlers have in common: attributes, errors, and buffers that must stay where they are.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "keras_hpc/engine.h"
#include "xla_ffi.hpp"

namespace keras_hpc::xla {

inline void check(int engine_result) {
  if (engine_result != KHPC_OK) throw std::runtime_error(khpc_last_error());
}

inline Error* new_error(const Api* api, const std::string& message) {
  CreateError arguments = {sizeof arguments, nullptr, message.c_str(), kInternal};
  return api->create_error(&arguments);
}

inline int attribute(const CallFrame& call, const char* name) {
  for (int64_t i = 0; i < call.attributes.size; ++i) {
    const ByteSpan& key = *call.attributes.names[i];
    if (std::string(key.data, key.size) != name) continue;
    const Scalar& scalar = *static_cast<const Scalar*>(call.attributes.values[i]);
    if (scalar.dtype == kS32) return *static_cast<const int32_t*>(scalar.value);
  }
  throw std::runtime_error(std::string("The call has no int32 attribute ") + name + ".");
}

inline std::string text_attribute(const CallFrame& call, const char* name) {
  for (int64_t i = 0; i < call.attributes.size; ++i) {
    const ByteSpan& key = *call.attributes.names[i];
    if (std::string(key.data, key.size) != name || call.attributes.types[i] != kString) continue;
    const ByteSpan& text = *static_cast<const ByteSpan*>(call.attributes.values[i]);
    return std::string(text.data, text.size);
  }
  throw std::runtime_error(std::string("The call has no text attribute ") + name + ".");
}

inline const char* name_of(int dtype) {
  switch (dtype) {
    case kS32:
      return "int32";
    case kS64:
      return "int64";
    case kF16:
      return "float16";
    case kBF16:
      return "bfloat16";
    case kF32:
      return "float32";
    case kF64:
      return "float64";
  }
  throw std::runtime_error("Unsupported dtype. Received: XLA type " + std::to_string(dtype) + ".");
}

// Where the engine works on each tensor. XLA may copy a buffer between start and done: the copy would hold
// half-reduced values, so done compares.
class Addresses {
 public:
  void set(int plan, int tensor, const void* address) {
    std::lock_guard lock(mutex_);
    addresses_[{plan, tensor}] = address;
  }
  const void* get(int plan, int tensor) {
    std::lock_guard lock(mutex_);
    return addresses_[{plan, tensor}];
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, int>, const void*> addresses_;
};
inline Addresses& addresses = *new Addresses;

inline std::string moved_tensors(const CallFrame& call, int plan, int tensors) {
  std::string moved;
  for (int tensor = 0; tensor < tensors; ++tensor) {
    if (call.results.values[tensor]->data == addresses.get(plan, tensor) || khpc_plan_nbytes(plan, tensor) == 0)
      continue;
    moved += " " + std::to_string(tensor);
  }
  return moved.empty() ? ""
                       : "XLA moved buffers of plan " + std::to_string(plan) +
                             " while they were being reduced. Tensors:" + moved + ".";
}

// Answers XLA's question for the version, or calls the handler. Exceptions end here, as an error of the program.
template <void handler(CallFrame&)>
Error* call(CallFrame* frame) {
  if (frame->extensions && frame->extensions->type == kMetadataExtension) {
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(frame->extensions)->metadata;
    metadata.version = {sizeof(Version), nullptr, kMajorVersion, kMinorVersion};
    metadata.traits = 0;
    return nullptr;
  }
  try {
    // Not by struct_size: what XLA writes there leaves out the last member of some structures.
    const Version& has = frame->api->version;
    if (has.major_version == kMajorVersion && has.minor_version < kMinorVersion)
      throw std::runtime_error("This jaxlib is older than 0.5.0: it has no futures for what runs beside a program.");
    handler(*frame);
    return nullptr;
  } catch (const std::exception& error) {
    return new_error(frame->api, error.what());
  }
}

}  // namespace keras_hpc::xla
