// SPDX-License-Identifier: Apache-2.0
// The part of TensorFlow's C API that our operations use, bound at run time to the TensorFlow of this process.
//
// Our own declarations, so that no TensorFlow is needed to build and one binary serves 2.17 to today's.
#pragma once
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace keras_hpc::tensorflow {

struct Status;
struct Tensor;
struct OpDefinitionBuilder;
struct ShapeHandle;
struct ShapeInferenceContext;
struct KernelBuilder;
struct OpKernelConstruction;
struct OpKernelContext;

using DataType = int;  // an enum in C; only ever passed through
constexpr int kInternal = 13;

using ShapeFunction = void(ShapeInferenceContext*, Status*);
using CreateFunction = void*(OpKernelConstruction*);
using ComputeFunction = void(void*, OpKernelContext*);
using DeleteFunction = void(void*);

// Every function we call: its name without the prefix "TF_", and its type.
#define KERAS_HPC_TENSORFLOW_API(X)                                                                                 \
  X(NewStatus, Status*())                                                                                           \
  X(DeleteStatus, void(Status*))                                                                                    \
  X(SetStatus, void(Status*, int code, const char* message))                                                        \
  X(GetCode, int(const Status*))                                                                                    \
  X(Message, const char*(const Status*))                                                                            \
  X(NewOpDefinitionBuilder, OpDefinitionBuilder*(const char* name))                                                 \
  X(OpDefinitionBuilderAddAttr, void(OpDefinitionBuilder*, const char* spec))                                       \
  X(OpDefinitionBuilderAddInput, void(OpDefinitionBuilder*, const char* spec))                                      \
  X(OpDefinitionBuilderAddOutput, void(OpDefinitionBuilder*, const char* spec))                                     \
  X(OpDefinitionBuilderSetIsStateful, void(OpDefinitionBuilder*, bool))                                             \
  X(OpDefinitionBuilderSetShapeInferenceFunction, void(OpDefinitionBuilder*, ShapeFunction*))                       \
  X(RegisterOpDefinition, void(OpDefinitionBuilder*, Status*))                                                      \
  X(NewShapeHandle, ShapeHandle*())                                                                                 \
  X(DeleteShapeHandle, void(ShapeHandle*))                                                                          \
  X(ShapeInferenceContextGetInput, void(ShapeInferenceContext*, int index, ShapeHandle*, Status*))                  \
  X(ShapeInferenceContextSetOutput, void(ShapeInferenceContext*, int index, ShapeHandle*, Status*))                 \
  X(ShapeInferenceContextScalar, ShapeHandle*(ShapeInferenceContext*))                                              \
  X(ShapeInferenceContextSetUnknownShape, void(ShapeInferenceContext*, Status*))                                    \
  X(NewKernelBuilder,                                                                                               \
    KernelBuilder*(const char* op, const char* device, CreateFunction*, ComputeFunction*, DeleteFunction*))         \
  X(KernelBuilder_HostMemory, void(KernelBuilder*, const char* argument))                                           \
  X(RegisterKernelBuilder, void(const char* name, KernelBuilder*, Status*))                                         \
  X(OpKernelConstruction_GetAttrInt64, void(OpKernelConstruction*, const char* name, int64_t* value, Status*))      \
  X(OpKernelConstruction_GetAttrSize,                                                                               \
    void(OpKernelConstruction*, const char* name, int32_t* list_size, int32_t* total_size, Status*))                \
  X(OpKernelConstruction_GetAttrString,                                                                             \
    void(OpKernelConstruction*, const char* name, char* value, size_t max_length, Status*))                         \
  X(OpKernelConstruction_Failure, void(OpKernelConstruction*, Status*))                                             \
  X(OpKernelContext_Failure, void(OpKernelContext*, Status*))                                                       \
  X(GetInput, void(OpKernelContext*, int index, Tensor**, Status*))                                                 \
  X(SetOutput, void(OpKernelContext*, int index, const Tensor*, Status*))                                           \
  X(AllocateOutput,                                                                                                 \
    Tensor*(OpKernelContext*, int index, DataType, const int64_t* dims, int rank, size_t nbytes, Status*))          \
  X(ForwardInputOrAllocateOutput, Tensor*(OpKernelContext*, const int* candidates, int candidate_count, int output, \
                                          const int64_t* dims, int rank, int* forwarded, Status*))                  \
  X(NewTensor, Tensor*(DataType, const int64_t* dims, int rank, void* data, size_t nbytes,                          \
                       void (*give_back)(void* data, size_t nbytes, void* argument), void* argument))               \
  X(DeleteTensor, void(Tensor*))                                                                                    \
  X(TensorType, DataType(const Tensor*))                                                                            \
  X(TensorData, void*(const Tensor*))                                                                               \
  X(TensorByteSize, size_t(const Tensor*))                                                                          \
  X(NumDims, int(const Tensor*))                                                                                    \
  X(Dim, int64_t(const Tensor*, int axis))                                                                          \
  X(DataTypeSize, size_t(DataType))

struct Api {
#define KERAS_HPC_DECLARE(name, type) std::add_pointer_t<type> name = nullptr;
  KERAS_HPC_TENSORFLOW_API(KERAS_HPC_DECLARE)
#undef KERAS_HPC_DECLARE

  // Throws std::runtime_error if TensorFlow is not loaded in this process, or lacks one of the functions.
  void bind() {
#define KERAS_HPC_BIND(name, type) name = reinterpret_cast<std::add_pointer_t<type>>(find("TF_" #name));
    KERAS_HPC_TENSORFLOW_API(KERAS_HPC_BIND)
#undef KERAS_HPC_BIND
  }

 private:
  static void* find(const char* symbol) {
    // RTLD_NOLOAD: only what this process already has, never a second TensorFlow.
    for (const char* library : {"libtensorflow_framework.so.2", "libtensorflow_cc.so.2"}) {
      if (void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) {
        if (void* address = dlsym(handle, symbol)) return address;
      }
    }
    throw std::runtime_error(std::string("No function ") + symbol + " in the TensorFlow of this process.");
  }
};

}  // namespace keras_hpc::tensorflow
