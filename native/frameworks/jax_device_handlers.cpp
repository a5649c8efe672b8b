// SPDX-License-Identifier: Apache-2.0
// JAX's door to the engine for buffers on a GPU. What is on the GPU, scalars too, no handler reads.
//
//   khpc_jax_start_on(gradient, weight) -> gradient       in place; queues its way to the host, returns at once
//   khpc_jax_wait_on(gradient...) -> gradient...          in place; returns when all means are on their way back: what
//                                                         XLA queues next finds them
//   khpc_jax_turn_on(gradient...) -> gradient..., updates the same for a pipelined plan
//   khpc_jax_second_on(gradient...) -> gradient...        in place; what the second update applies
//   khpc_jax_allreduce_on(x, token) -> x, token           keras_hpc.allreduce: in place, blocks
//
// XLA has one order of what it queues on a GPU, which the lowering influences: see backends/jax_device.py.
#include <vector>

#include "xla_call.hpp"

namespace keras_hpc::xla {
namespace {

// XLA's stream. On the host, where tests run these handlers, it has none: then handlers wait for what they have queued.
void* stream_of(const CallFrame& call) {
  GetStream arguments = {sizeof arguments, nullptr, call.context, nullptr};
  if (Error* error = call.api->get_stream(&arguments)) {
    DestroyError destroyed = {sizeof destroyed, nullptr, error};
    call.api->destroy_error(&destroyed);
    return nullptr;
  }
  return arguments.stream;
}

void start_on(CallFrame& call) {
  const int plan = attribute(call, "plan"), tensor = attribute(call, "tensor");
  const Buffer& weight = *call.arguments.values[1];
  if (weight.dtype != kF32 && weight.dtype != kF64) throw std::runtime_error("The weight must be float32 or float64.");
  void* data = call.results.values[0]->data;
  addresses.set(plan, tensor, data);
  check(khpc_start_on(plan, tensor, data, weight.data, weight.dtype == kF32 ? 4 : 8, stream_of(call)));
}

void finish(int plan, void* stream) {
  if (stream == nullptr) check(khpc_finish_on(plan));
}

void wait_for_all(CallFrame& call, int plan, int tensors, void* stream) {
  check(khpc_wait_on(plan, stream));
  if (const std::string moved = moved_tensors(call, plan, tensors); !moved.empty()) throw std::runtime_error(moved);
}

void wait_on(CallFrame& call) {
  const int plan = attribute(call, "plan");
  void* stream = stream_of(call);
  wait_for_all(call, plan, static_cast<int>(call.results.size), stream);
  finish(plan, stream);
}

void turn_on(CallFrame& call) {
  const int plan = attribute(call, "plan");
  const auto tensors = static_cast<int>(call.results.size) - 1;
  void* stream = stream_of(call);
  wait_for_all(call, plan, tensors, stream);
  check(khpc_write_updates(plan, call.results.values[tensors]->data, stream));
  finish(plan, stream);
}

void second_on(CallFrame& call) {
  const int plan = attribute(call, "plan");
  std::vector<void*> data;
  for (int64_t i = 0; i < call.results.size; ++i) data.push_back(call.results.values[i]->data);
  void* stream = stream_of(call);
  check(khpc_second_on(plan, data.data(), stream));
  finish(plan, stream);
}

void allreduce_on(CallFrame& call) {
  const Buffer& x = *call.results.values[0];
  check(khpc_allreduce_on(attribute(call, "team"), attribute(call, "device"), x.data, x.dims, static_cast<int>(x.rank),
                          name_of(x.dtype), text_attribute(call, "op").c_str(), text_attribute(call, "what").c_str(),
                          stream_of(call)));
}

}  // namespace

extern "C" KHPC_API Error* khpc_jax_start_on(CallFrame* frame) {
  return call<start_on>(frame);
}
extern "C" KHPC_API Error* khpc_jax_wait_on(CallFrame* frame) {
  return call<wait_on>(frame);
}
extern "C" KHPC_API Error* khpc_jax_turn_on(CallFrame* frame) {
  return call<turn_on>(frame);
}
extern "C" KHPC_API Error* khpc_jax_second_on(CallFrame* frame) {
  return call<second_on>(frame);
}
extern "C" KHPC_API Error* khpc_jax_allreduce_on(CallFrame* frame) {
  return call<allreduce_on>(frame);
}

}  // namespace keras_hpc::xla
