// SPDX-License-Identifier: Apache-2.0
// The part of XLA's foreign function interface (FFI) that our handlers use: a stable C ABI of plain structures.
//
// Our own declarations of version 0.1 (jaxlib 0.5.0), so that no JAX is needed to build. XLA accepts handlers of
// older versions, never of newer ones, so 0.1 serves every jaxlib from 0.5.0 on. Each structure begins with its size
// in bytes; later versions may append members, and do not move these.
#pragma once
#include <cstddef>
#include <cstdint>

namespace keras_hpc::xla {

constexpr int kMajorVersion = 0, kMinorVersion = 1;
constexpr int kMetadataExtension = 1;
constexpr int kInternal = 13;
enum DataType : int { kS32 = 4, kS64 = 5, kF16 = 10, kF32 = 11, kF64 = 12, kBF16 = 16 };
enum AttributeType : int { kScalar = 3, kString = 4 };

struct Error;
struct Future;
struct Context;

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extensions;
  int major_version, minor_version;
};

struct CreateError {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int code;
};

struct CreateFuture {
  size_t struct_size;
  Extension* extensions;
  Future* future;  // out
};

struct SetAvailable {
  size_t struct_size;
  Extension* extensions;
  Future* future;
};

struct SetError {
  size_t struct_size;
  Extension* extensions;
  Future* future;
  Error* error;  // goes to XLA
};

struct DestroyError {
  size_t struct_size;
  Extension* extensions;
  Error* error;
};

struct GetStream {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  // out: a CUstream
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  void* internal;
  Error* (*create_error)(CreateError*);
  void* get_message_not_used;
  Error* (*destroy_error)(DestroyError*);
  void* register_not_used;
  Error* (*get_stream)(GetStream*);
  void* functions_not_used[8];
  Error* (*create_future)(CreateFuture*);
  Error* (*set_available)(SetAvailable*);
  Error* (*set_error)(SetError*);
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  Buffer** values;
};

struct ByteSpan {
  const char* data;
  size_t size;
};

struct Scalar {
  int dtype;
  void* value;
};

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  ByteSpan** names;
  void** values;
};

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
  Future* future;  // out
};

// Instead of a call, XLA may ask for which version a handler was written.
struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

}  // namespace keras_hpc::xla
