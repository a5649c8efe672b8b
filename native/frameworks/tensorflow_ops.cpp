// SPDX-License-Identifier: Apache-2.0
// TensorFlow's door to the engine: stateful operations, synchronous kernels.
//
//   KhpcStart(x, weight) -> y    hands x's buffer to the engine and returns at once
//   KhpcWait(y) -> z             blocks until the buffer holds the reduced values
//   KhpcUpdates() -> count       how many updates a pipelined step makes, after its starts
//   KhpcSecond(z) -> w           the average that the second of two updates applies
//   KhpcLocalBegin(samples) -> mode   what a step of a plan with local steps has to do
//   KhpcLocalAnchor(x)           the weights at the beginning of a period, for an outer optimizer
//   KhpcAllgather(x) -> rows     the rows of all ranks, in rank order
//   KhpcAllreduce(x) -> y        keras_hpc.allreduce: needs no plan, so ranks need not trace alike
//   KhpcExchange(x, token) -> y, after   rows of other ranks, or their gradients. Tokens put exchanges in one order
//
// Stateful, because TensorFlow runs stateful operations in program order, which is our order on all ranks, and never
// folds, merges or drops them. Synchronous, because async kernels of the C API are used after they return.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "keras_hpc/engine.h"
#include "tensorflow_c.hpp"

namespace keras_hpc::tensorflow {
namespace {

Api tf;

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

void check(int engine_result) {
  if (engine_result != KHPC_OK) throw std::runtime_error(khpc_last_error());
}

// The buffers that the engine works on. A step that fails elsewhere frees its buffers, also those the engine still
// writes to: so each is kept from start to wait. Never destroyed: TensorFlow may be gone before our static objects.
class InFlight {
 public:
  void keep(int plan, int tensor, TensorHandle buffer) {
    std::lock_guard lock(mutex_);
    buffers_[{plan, tensor}] = std::move(buffer);
  }
  void release(int plan, int tensor) {
    std::lock_guard lock(mutex_);
    buffers_[{plan, tensor}].reset();
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, int>, TensorHandle> buffers_;
};
InFlight& in_flight = *new InFlight;

// Of tensors that were not reduced where they lay, because somebody else held them, too.
std::atomic<int64_t> copied_bytes{0};

TensorHandle input(OpKernelContext* context, int index) {
  Outcome outcome;
  Tensor* tensor = nullptr;
  tf.GetInput(context, index, &tensor, outcome);
  outcome.check();
  return TensorHandle(tensor);
}

std::vector<int64_t> shape_of(const TensorHandle& tensor) {
  std::vector<int64_t> shape(tf.NumDims(tensor.get()));
  for (size_t axis = 0; axis < shape.size(); ++axis) shape[axis] = tf.Dim(tensor.get(), static_cast<int>(axis));
  return shape;
}

int attribute(OpKernelConstruction* construction, const char* name) {
  Outcome outcome;
  int64_t value = 0;
  tf.OpKernelConstruction_GetAttrInt64(construction, name, &value, outcome);
  outcome.check();
  return static_cast<int>(value);
}

std::string text_attribute(OpKernelConstruction* construction, const char* name) {
  Outcome outcome;
  int32_t list_size = 0, length = 0;
  tf.OpKernelConstruction_GetAttrSize(construction, name, &list_size, &length, outcome);
  outcome.check();
  std::string text(static_cast<size_t>(length), '\0');
  tf.OpKernelConstruction_GetAttrString(construction, name, text.data(), text.size(), outcome);
  outcome.check();
  return text;
}

const char* name_of(DataType dtype) {
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

struct TensorOfPlan {
  explicit TensorOfPlan(OpKernelConstruction* node)
      : plan(attribute(node, "plan")), tensor(attribute(node, "tensor")) {}
  const int plan, tensor;
};

struct Start : TensorOfPlan {
  static constexpr const char* name = "KhpcStart";
  using TensorOfPlan::TensorOfPlan;

  void compute(OpKernelContext* context) const {
    const double weight = *static_cast<const double*>(tf.TensorData(input(context, 1).get()));
    TensorHandle gradient = input(context, 0);
    const std::vector<int64_t> shape = shape_of(gradient);
    const size_t nbytes = tf.TensorByteSize(gradient.get());
    const void* source = tf.TensorData(gradient.get());
    const int64_t expected = khpc_plan_nbytes(plan, tensor);
    if (expected >= 0 && static_cast<int64_t>(nbytes) != expected) {
      throw std::runtime_error("Tensor " + std::to_string(tensor) + " of plan " + std::to_string(plan) + " must have " +
                               std::to_string(expected) + " bytes. Received: " + std::to_string(nbytes) + " bytes.");
    }

    gradient.reset();  // a buffer is forwarded only if nobody else holds it; the context keeps it alive
    const int candidate = 0;
    int forwarded = -1;
    Outcome outcome;
    TensorHandle output(tf.ForwardInputOrAllocateOutput(context, &candidate, 1, 0, shape.data(),
                                                        static_cast<int>(shape.size()), &forwarded, outcome));
    outcome.check();
    void* data = tf.TensorData(output.get());
    if (forwarded != candidate && nbytes > 0) {
      std::memcpy(data, source, nbytes);
      copied_bytes += static_cast<int64_t>(nbytes);
    }
    check(khpc_start(plan, tensor, data, weight));
    in_flight.keep(plan, tensor, std::move(output));
  }
};

struct Wait : TensorOfPlan {
  static constexpr const char* name = "KhpcWait";
  using TensorOfPlan::TensorOfPlan;

  void compute(OpKernelContext* context) const {
    check(khpc_wait(plan, tensor));
    in_flight.release(plan, tensor);
    Outcome outcome;
    tf.SetOutput(context, 0, input(context, 0).get(), outcome);
    outcome.check();
  }
};

struct Updates {
  static constexpr const char* name = "KhpcUpdates";
  explicit Updates(OpKernelConstruction* node) : plan(attribute(node, "plan")) {}

  void compute(OpKernelContext* context) const {
    constexpr DataType int32 = 3;
    const int updates = khpc_updates(plan);
    if (updates < 0) throw std::runtime_error(khpc_last_error());
    Outcome outcome;
    const TensorHandle count(tf.AllocateOutput(context, 0, int32, nullptr, 0, sizeof(int32_t), outcome));
    outcome.check();
    *static_cast<int32_t*>(tf.TensorData(count.get())) = updates;
  }

  const int plan;
};

struct Second : TensorOfPlan {
  static constexpr const char* name = "KhpcSecond";
  using TensorOfPlan::TensorOfPlan;

  void compute(OpKernelContext* context) const {
    TensorHandle first = input(context, 0);
    const std::vector<int64_t> shape = shape_of(first);
    const DataType dtype = tf.TensorType(first.get());
    const size_t nbytes = tf.TensorByteSize(first.get());
    Outcome outcome;
    const TensorHandle output(
        tf.AllocateOutput(context, 0, dtype, shape.data(), static_cast<int>(shape.size()), nbytes, outcome));
    outcome.check();
    check(khpc_second(plan, tensor, tf.TensorData(output.get())));
  }
};

struct LocalBegin {
  static constexpr const char* name = "KhpcLocalBegin";
  explicit LocalBegin(OpKernelConstruction* node) : plan(attribute(node, "plan")) {}

  void compute(OpKernelContext* context) const {
    constexpr DataType int32 = 3;
    const int mode = khpc_local_begin(plan, *static_cast<const double*>(tf.TensorData(input(context, 0).get())));
    if (mode < 0) throw std::runtime_error(khpc_last_error());
    Outcome outcome;
    const TensorHandle output(tf.AllocateOutput(context, 0, int32, nullptr, 0, sizeof(int32_t), outcome));
    outcome.check();
    *static_cast<int32_t*>(tf.TensorData(output.get())) = mode;
  }

  const int plan;
};

struct LocalAnchor : TensorOfPlan {
  static constexpr const char* name = "KhpcLocalAnchor";
  using TensorOfPlan::TensorOfPlan;

  void compute(OpKernelContext* context) const {
    check(khpc_local_anchor(plan, tensor, tf.TensorData(input(context, 0).get())));
  }
};

struct Allgather {
  static constexpr const char* name = "KhpcAllgather";
  explicit Allgather(OpKernelConstruction* node) : team(attribute(node, "team")) {}

  void compute(OpKernelContext* context) const {
    const TensorHandle mine = input(context, 0);
    std::vector<int64_t> shape = shape_of(mine);
    if (shape.empty()) throw std::runtime_error("Only tensors with rows can be gathered. Received: a scalar.");
    const int size = khpc_team_size(team);
    if (size < 0) throw std::runtime_error("There is no such team. Received: team " + std::to_string(team) + ".");

    const DataType dtype = tf.TensorType(mine.get());
    const int64_t row_nbytes = std::accumulate(shape.begin() + 1, shape.end(),
                                               static_cast<int64_t>(tf.DataTypeSize(dtype)), std::multiplies<>());
    std::vector<int64_t> counts(size);
    check(khpc_allgather_counts(team, shape[0], counts.data()));
    shape[0] = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    for (int64_t& count : counts) count *= row_nbytes;

    Outcome outcome;
    TensorHandle all(tf.AllocateOutput(context, 0, dtype, shape.data(), static_cast<int>(shape.size()),
                                       shape[0] * row_nbytes, outcome));
    outcome.check();
    check(khpc_allgatherv(team, tf.TensorData(mine.get()), static_cast<int64_t>(tf.TensorByteSize(mine.get())),
                          tf.TensorData(all.get()), counts.data()));
  }

  const int team;
};

struct Allreduce {
  static constexpr const char* name = "KhpcAllreduce";
  explicit Allreduce(OpKernelConstruction* node)
      : team(attribute(node, "team")), op(text_attribute(node, "op")), what(text_attribute(node, "what")) {}

  void compute(OpKernelContext* context) const {
    TensorHandle x = input(context, 0);
    const std::vector<int64_t> shape = shape_of(x);
    const DataType dtype = tf.TensorType(x.get());
    const size_t nbytes = tf.TensorByteSize(x.get());
    const void* source = tf.TensorData(x.get());
    x.reset();  // a buffer is forwarded only if nobody else holds it; the context keeps it alive
    const int candidate = 0;
    int forwarded = -1;
    Outcome outcome;
    const TensorHandle y(tf.ForwardInputOrAllocateOutput(context, &candidate, 1, 0, shape.data(),
                                                         static_cast<int>(shape.size()), &forwarded, outcome));
    outcome.check();
    void* data = tf.TensorData(y.get());
    if (forwarded != candidate && nbytes > 0) std::memcpy(data, source, nbytes);
    check(khpc_allreduce_tensor(team, data, shape.data(), static_cast<int>(shape.size()), name_of(dtype), op.c_str(),
                                what.c_str()));
  }

  const int team;
  const std::string op, what;
};

struct Exchange {
  static constexpr const char* name = "KhpcExchange";
  explicit Exchange(OpKernelConstruction* node)
      : exchange(attribute(node, "exchange")), axis(attribute(node, "axis")), adjoint(attribute(node, "adjoint")) {}

  void compute(OpKernelContext* context) const {
    const TensorHandle x = input(context, 0);
    std::vector<int64_t> shape = shape_of(x);
    const auto at_axis = shape.begin() + axis;
    const int64_t outer = std::accumulate(shape.begin(), at_axis, int64_t{1}, std::multiplies<>());
    const int64_t mine = khpc_exchange_rows(exchange), window = khpc_exchange_window(exchange),
                  cells = khpc_exchange_cells(exchange);
    if (mine < 0 || window < 0 || cells < 0) throw std::runtime_error(khpc_last_error());
    if (*at_axis != (adjoint ? window : mine))
      throw std::runtime_error("An exchange got " + std::to_string(*at_axis) + " rows. Expected " +
                               std::to_string(adjoint ? window : mine) + ".");
    const auto elements = [&] { return std::accumulate(at_axis + 1, shape.end(), int64_t{1}, std::multiplies<>()); };
    *at_axis = adjoint ? mine : window;
    int64_t inner = elements();
    if (cells > 0) at_axis[1] += adjoint ? -cells : cells;
    const int64_t in_result = elements();
    if (adjoint) inner = in_result;
    const DataType dtype = tf.TensorType(x.get()), float32 = 1;
    const size_t nbytes = static_cast<size_t>(outer * *at_axis * in_result) * tf.DataTypeSize(dtype);
    Outcome outcome;
    const TensorHandle y(
        tf.AllocateOutput(context, 0, dtype, shape.data(), static_cast<int>(shape.size()), nbytes, outcome));
    outcome.check();
    const TensorHandle after(tf.AllocateOutput(context, 1, float32, nullptr, 0, sizeof(float), outcome));
    outcome.check();
    *static_cast<float*>(tf.TensorData(after.get())) = 0;
    check(khpc_exchange_start(exchange, adjoint, tf.TensorData(x.get()), outer, inner, name_of(dtype)));
    check(khpc_exchange_wait(exchange, adjoint, tf.TensorData(y.get())));
  }

  const int exchange, axis, adjoint;
};

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

void same_shape(ShapeInferenceContext* context, Status* status) {
  const ShapePointer shape(tf.NewShapeHandle());
  tf.ShapeInferenceContextGetInput(context, 0, shape.get(), status);
  if (tf.GetCode(status) == 0) tf.ShapeInferenceContextSetOutput(context, 0, shape.get(), status);
}

void scalar(ShapeInferenceContext* context, Status* status) {
  const ShapePointer shape(tf.ShapeInferenceContextScalar(context));
  tf.ShapeInferenceContextSetOutput(context, 0, shape.get(), status);
}

void unknown_shape(ShapeInferenceContext* context, Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
}

void nothing(ShapeInferenceContext*, Status*) {}

using Specs = std::vector<const char*>;

template <class Kernel>
void add_operation(const Specs& inputs, const Specs& outputs, const Specs& attributes, ShapeFunction* shape) {
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
    KernelBuilder* builder =
        tf.NewKernelBuilder(Kernel::name, device, create<Kernel>, compute<Kernel>, destroy<Kernel>);
    // On a GPU the same kernel runs on the host, and TensorFlow copies there and back. On a CPU the same words would
    // keep TensorFlow from forwarding any buffer: it takes one that must be on the host for another kind of memory.
    if (device == std::string("GPU"))
      for (const Specs& arguments : {inputs, outputs})
        for (const char* spec : arguments)
          tf.KernelBuilder_HostMemory(builder, std::string(spec, strcspn(spec, ":")).c_str());
    tf.RegisterKernelBuilder(Kernel::name, builder, outcome);
    outcome.check();
  }
}

// Returns an empty text, or why it failed.
std::string add_operations() {
  try {
    tf.bind();
    add_operation<Start>({"x: T", "weight: double"}, {"y: T"}, {"plan: int", "tensor: int"}, same_shape);
    add_operation<Wait>({"y: T"}, {"z: T"}, {"plan: int", "tensor: int"}, same_shape);
    add_operation<Updates>({}, {"count: int32"}, {"plan: int"}, scalar);
    add_operation<Second>({"z: T"}, {"w: T"}, {"plan: int", "tensor: int"}, same_shape);
    add_operation<LocalBegin>({"samples: double"}, {"mode: int32"}, {"plan: int"}, scalar);
    add_operation<LocalAnchor>({"x: T"}, {}, {"plan: int", "tensor: int"}, nothing);
    add_operation<Allgather>({"x: T"}, {"rows: T"}, {"team: int"}, unknown_shape);
    add_operation<Allreduce>({"x: T"}, {"y: T"}, {"team: int", "op: string", "what: string"}, same_shape);
    add_operation<Exchange>({"x: T", "token: float"}, {"y: T", "after: float"},
                            {"exchange: int", "axis: int", "adjoint: int"}, unknown_shape);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// TensorFlow takes up what a library registers while it is being loaded; nothing may be thrown there.
const std::string load_error = add_operations();

}  // namespace

extern "C" KHPC_API const char* khpc_tensorflow_load_error() {
  return load_error.c_str();
}

extern "C" KHPC_API int64_t khpc_tensorflow_copied_bytes() {
  return copied_bytes;
}

}  // namespace keras_hpc::tensorflow
