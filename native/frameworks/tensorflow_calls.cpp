// SPDX-License-Identifier: Apache-2.0
// TensorFlow's door to the engine, of what needs no plan: see tensorflow_ops.cpp.
//
//   KhpcAllgather(x) -> rows     the rows of all ranks, in rank order
//   KhpcAllreduce(x) -> y        keras_hpc.allreduce: ranks need not trace alike
//   KhpcExchange(x, token) -> y, after   rows of other ranks, or their gradients. Tokens put exchanges in one order
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "tensorflow_kernel.hpp"

namespace keras_hpc::tensorflow {
namespace {

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

}  // namespace

void add_calls() {
  add_operation<Allgather>({"x: T"}, {"rows: T"}, {"team: int"}, unknown_shape);
  add_operation<Allreduce>({"x: T"}, {"y: T"}, {"team: int", "op: string", "what: string"}, same_shape);
  add_operation<Exchange>({"x: T", "token: float"}, {"y: T", "after: float"},
                          {"exchange: int", "axis: int", "adjoint: int"}, unknown_shape);
}

}  // namespace keras_hpc::tensorflow
