// SPDX-License-Identifier: Apache-2.0
// What kernels and operations of TensorFlow's C API have in common.
#pragma once
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "keras_hpc/engine.h"
#include "tensorflow_c.hpp"

namespace keras_hpc::tensorflow {

inline Api tf;

struct Release {
  void operator()(Tensor* tensor) const { tf.DeleteTensor(tensor); }
  void operator()(ShapeHandle* shape) const { tf.DeleteShapeHandle(shape); }
};
using TensorHandle = std::unique_ptr<Tensor, Release>;
using ShapePointer = std::unique_ptr<ShapeHandle, Release>;

class Outcome {
 public:
  Outcome() : status_(tf.NewStatus()) {}
  explicit Outcome(const char* error) : Outcome() { tf.SetStatus(status_, kInternal, error); }
  ~Outcome() { tf.DeleteStatus(status_); }
  Outcome(const Outcome&) = delete;
  Outcome& operator=(const Outcome&) = delete;

  operator Status*() const { return status_; }
  void check() const {
    if (tf.GetCode(status_) != 0) throw std::runtime_error(tf.Message(status_));
  }

 private:
  Status* status_;
};

inline void check(int engine_result) {
  if (engine_result != KHPC_OK) throw std::runtime_error(khpc_last_error());
}

inline TensorHandle input(OpKernelContext* context, int index) {
  Outcome outcome;
  Tensor* tensor = nullptr;
  tf.GetInput(context, index, &tensor, outcome);
  outcome.check();
  return TensorHandle(tensor);
}

inline std::vector<int64_t> shape_of(const TensorHandle& tensor) {
  std::vector<int64_t> shape(tf.NumDims(tensor.get()));
  for (size_t axis = 0; axis < shape.size(); ++axis) shape[axis] = tf.Dim(tensor.get(), static_cast<int>(axis));
  return shape;
}

inline int attribute(OpKernelConstruction* construction, const char* name) {
  Outcome outcome;
  int64_t value = 0;
  tf.OpKernelConstruction_GetAttrInt64(construction, name, &value, outcome);
  outcome.check();
  return static_cast<int>(value);
}

inline std::string text_attribute(OpKernelConstruction* construction, const char* name) {
  Outcome outcome;
  int32_t list_size = 0, length = 0;
  tf.OpKernelConstruction_GetAttrSize(construction, name, &list_size, &length, outcome);
  outcome.check();
  std::string text(static_cast<size_t>(length), '\0');
  tf.OpKernelConstruction_GetAttrString(construction, name, text.data(), text.size(), outcome);
  outcome.check();
  return text;
}

inline const char* name_of(DataType dtype) {
  switch (dtype) {  // of tensorflow/core/framework/types.proto
    case 1:
      return "float32";
    case 2:
      return "float64";
    case 3:
      return "int32";
    case 9:
      return "int64";
    case 14:
      return "bfloat16";
    case 19:
      return "float16";
  }
  throw std::runtime_error("Unsupported dtype. Received: TensorFlow's type " + std::to_string(dtype) + ".");
}

// Exceptions end here, as the failure of the operation that TensorFlow then raises in Python.
template <class Kernel>
void* create(OpKernelConstruction* construction) {
  try {
    return new Kernel(construction);
  } catch (const std::exception& error) {
    tf.OpKernelConstruction_Failure(construction, Outcome(error.what()));
    return nullptr;
  }
}

template <class Kernel>
void compute(void* kernel, OpKernelContext* context) {
  try {
    static_cast<const Kernel*>(kernel)->compute(context);
  } catch (const std::exception& error) {
    tf.OpKernelContext_Failure(context, Outcome(error.what()));
  }
}

template <class Kernel>
void destroy(void* kernel) {
  delete static_cast<Kernel*>(kernel);
}

inline void same_shape(ShapeInferenceContext* context, Status* status) {
  const ShapePointer shape(tf.NewShapeHandle());
  tf.ShapeInferenceContextGetInput(context, 0, shape.get(), status);
  if (tf.GetCode(status) == 0) tf.ShapeInferenceContextSetOutput(context, 0, shape.get(), status);
}

inline void scalar(ShapeInferenceContext* context, Status* status) {
  const ShapePointer shape(tf.ShapeInferenceContextScalar(context));
  tf.ShapeInferenceContextSetOutput(context, 0, shape.get(), status);
}

inline void unknown_shape(ShapeInferenceContext* context, Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
}

inline void nothing(ShapeInferenceContext*, Status*) {}

using Specs = std::vector<const char*>;

// `on_gpu`: names of arguments that are in a GPU's memory, of an operation for GPUs only.
template <class Kernel>
void add_operation(const Specs& inputs, const Specs& outputs, const Specs& attributes, ShapeFunction* shape,
                   const std::vector<std::string>& on_gpu = {}) {
  OpDefinitionBuilder* operation = tf.NewOpDefinitionBuilder(Kernel::name);
  const auto generic = [](const char* spec) { return std::string(spec).find(": T") != std::string::npos; };
  if (std::any_of(inputs.begin(), inputs.end(), generic))
    tf.OpDefinitionBuilderAddAttr(operation, "T: {half, bfloat16, float, double, int32, int64}");
  for (const char* spec : attributes) tf.OpDefinitionBuilderAddAttr(operation, spec);
  for (const char* spec : inputs) tf.OpDefinitionBuilderAddInput(operation, spec);
  for (const char* spec : outputs) tf.OpDefinitionBuilderAddOutput(operation, spec);
  tf.OpDefinitionBuilderSetIsStateful(operation, true);
  tf.OpDefinitionBuilderSetShapeInferenceFunction(operation, shape);
  Outcome outcome;
  tf.RegisterOpDefinition(operation, outcome);
  outcome.check();

  for (const char* device : {"CPU", "GPU"}) {
    if (device == std::string("CPU") && !on_gpu.empty()) continue;
    KernelBuilder* builder =
        tf.NewKernelBuilder(Kernel::name, device, create<Kernel>, compute<Kernel>, destroy<Kernel>);
    // On a GPU the same kernel runs on the host, and TensorFlow copies there and back. On a CPU the same words would
    // keep TensorFlow from forwarding any buffer: it takes one that must be on the host for another kind of memory.
    if (device == std::string("GPU"))
      for (const Specs& arguments : {inputs, outputs})
        for (const char* spec : arguments) {
          const std::string argument(spec, strcspn(spec, ":"));
          if (std::count(on_gpu.begin(), on_gpu.end(), argument) == 0)
            tf.KernelBuilder_HostMemory(builder, argument.c_str());
        }
    tf.RegisterKernelBuilder(Kernel::name, builder, outcome);
    outcome.check();
  }
}

// Of tensorflow_calls.cpp.
void add_calls();

}  // namespace keras_hpc::tensorflow
