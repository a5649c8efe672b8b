// SPDX-License-Identifier: Apache-2.0
// TensorFlow's door to the engine: stateful operations, synchronous kernels. Here those of plans.
//
//   KhpcStart(x, weight) -> y    hands x's buffer to the engine and returns at once
//   KhpcWait(y) -> z             blocks until the buffer holds the reduced values
//   KhpcStartOn(x, token, weight) -> y, KhpcWaitOn(y) -> z   the same on a GPU. The token is a part of x on the host:
//                                once it has come, x has been computed. The first wait is for all of a plan
//   KhpcUpdates() -> count       how many updates a pipelined step makes, after its starts
//   KhpcSecond(z) -> w           the average that the second of two updates applies
//   KhpcLocalBegin(samples) -> mode   what a step of a plan with local steps has to do
//   KhpcLocalAnchor(x)           the weights at the beginning of a period, for an outer optimizer
//
// Stateful, because TensorFlow runs stateful operations in program order, which is our order on all ranks, and never
// folds, merges or drops them. Synchronous, because async kernels of the C API are used after they return.
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow_kernel.hpp"

namespace keras_hpc::tensorflow {
namespace {

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

struct TensorOfPlan {
  explicit TensorOfPlan(OpKernelConstruction* node)
      : plan(attribute(node, "plan")), tensor(attribute(node, "tensor")) {}
  void check_size(size_t nbytes) const {
    const int64_t expected = khpc_plan_nbytes(plan, tensor);
    if (expected >= 0 && static_cast<int64_t>(nbytes) != expected)
      throw std::runtime_error("Tensor " + std::to_string(tensor) + " of plan " + std::to_string(plan) + " must have " +
                               std::to_string(expected) + " bytes. Received: " + std::to_string(nbytes) + " bytes.");
  }
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
    check_size(nbytes);

    Outcome outcome;
    if (khpc_plan_only_reads(plan, tensor) == 1) {  // as a variable, which holds its buffer
      tf.SetOutput(context, 0, gradient.get(), outcome);
      outcome.check();
      check(khpc_start(plan, tensor, const_cast<void*>(source), weight));
      in_flight.keep(plan, tensor, std::move(gradient));
      return;
    }
    gradient.reset();  // a buffer is forwarded only if nobody else holds it; the context keeps it alive
    const int candidate = 0;
    int forwarded = -1;
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

// TensorFlow shows no stream of a GPU's. So x goes to memory that the engine lends, which nothing that TensorFlow has
// queued still reads or writes; it comes back when TensorFlow has released the mean.
struct StartOn : TensorOfPlan {
  static constexpr const char* name = "KhpcStartOn";
  using TensorOfPlan::TensorOfPlan;

  void compute(OpKernelContext* context) const {
    const double weight = *static_cast<const double*>(tf.TensorData(input(context, 2).get()));
    TensorHandle gradient = input(context, 0);
    const std::vector<int64_t> shape = shape_of(gradient);
    check_size(tf.TensorByteSize(gradient.get()));
    void *lent = nullptr, *loan = nullptr;
    check(khpc_lend(plan, tensor, tf.TensorData(gradient.get()), weight, &lent, &loan));
    const TensorHandle output(tf.NewTensor(
        tf.TensorType(gradient.get()), shape.data(), static_cast<int>(shape.size()), lent,
        tf.TensorByteSize(gradient.get()), [](void*, size_t, void* its) { khpc_give_back(its); }, loan));
    in_flight.keep(plan, tensor, std::move(gradient));
    Outcome outcome;
    tf.SetOutput(context, 0, output.get(), outcome);
    outcome.check();
  }
};

struct WaitOn : TensorOfPlan {
  static constexpr const char* name = "KhpcWaitOn";
  explicit WaitOn(OpKernelConstruction* node) : TensorOfPlan(node), first(attribute(node, "first") != 0) {}

  void compute(OpKernelContext* context) const {
    if (first) {
      check(khpc_wait_on(plan, nullptr));
      check(khpc_finish_on(plan));
    }
    in_flight.release(plan, tensor);
    Outcome outcome;
    tf.SetOutput(context, 0, input(context, 0).get(), outcome);
    outcome.check();
  }

  const bool first;
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

// Returns an empty text, or why it failed.
std::string add_operations() {
  try {
    tf.bind();
    add_operation<Start>({"x: T", "weight: double"}, {"y: T"}, {"plan: int", "tensor: int"}, same_shape);
    add_operation<Wait>({"y: T"}, {"z: T"}, {"plan: int", "tensor: int"}, same_shape);
    add_operation<StartOn>({"x: T", "token: T", "weight: double"}, {"y: T"}, {"plan: int", "tensor: int"}, same_shape,
                           {"x", "y"});
    add_operation<WaitOn>({"y: T"}, {"z: T"}, {"plan: int", "tensor: int", "first: int"}, same_shape, {"y", "z"});
    add_operation<Updates>({}, {"count: int32"}, {"plan: int"}, scalar);
    add_operation<Second>({"z: T"}, {"w: T"}, {"plan: int", "tensor: int"}, same_shape);
    add_operation<LocalBegin>({"samples: double"}, {"mode: int32"}, {"plan: int"}, scalar);
    add_operation<LocalAnchor>({"x: T"}, {}, {"plan: int", "tensor: int"}, nothing);
    add_calls();
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
