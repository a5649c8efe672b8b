// SPDX-License-Identifier: Apache-2.0
// JAX's door to the engine: XLA FFI handlers, for buffers on the host.
//
//   khpc_jax_start(gradient, weight, active, ...) -> gradient   in place; hands the buffer to the engine, returns at
//   once. What more it is given has to exist before
//   khpc_jax_done(gradient..., active) -> gradient...      in place; complete when all of the plan's tensors are
//   reduced
//   khpc_jax_turn(gradient..., active) -> gradient..., updates   the same for a pipelined plan: what the first update
//   of
//                                                          this step applies, and how many updates there are
//   khpc_jax_second(gradient...) -> gradient...            in place; what the second update applies
//   khpc_jax_local_begin(gradient, samples) -> gradient, mode   a step of a plan with local steps begins
//   khpc_jax_local_anchor(weights, mode) -> 0              the weights before its update, if it has to tell
//   khpc_jax_allreduce(x, token) -> x, token               keras_hpc.allreduce: in place, blocks. The token gives the
//                                                          order among calls
//
//   khpc_jax_exchange(x, token, ...) -> y, token           rows of other ranks, or their gradients; blocks. The token
//                                                          gives the order among exchanges; what else is given is only
//                                                          to be computed before
//
// XLA's data flow gives the order: each start runs when its gradient exists, done after all starts. When `active` is
// false (the same on all ranks), both leave the buffers as they are.
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/condition.hpp"
#include "xla_call.hpp"

namespace keras_hpc::xla {
namespace {

double weight_of(const Buffer& buffer) {
  switch (buffer.dtype) {
    case kF32:
      return *static_cast<const float*>(buffer.data);
    case kF64:
      return *static_cast<const double*>(buffer.data);
  }
  throw std::runtime_error("The weight must be float32 or float64. Received: XLA type " + std::to_string(buffer.dtype) +
                           ".");
}

bool is_true(const Buffer& buffer) {
  return *static_cast<const bool*>(buffer.data);
}

// Tells XLA that one call of done is complete.
class Completion {
 public:
  // `updates`, if given, gets the number of updates of the plan's step.
  Completion(const Api* api, std::string error, int plan = 0, int32_t* updates = nullptr)
      : api_(api), error_(std::move(error)), plan_(plan), updates_(updates) {
    CreateFuture arguments = {sizeof arguments, nullptr, nullptr};
    if (api_->create_future(&arguments)) throw std::runtime_error("XLA could not create a future.");
    future_ = arguments.future;
  }
  Future* future() const { return future_; }

  void fail(const char* error) {
    if (error_.empty()) error_ = error;
  }
  void finish() {
    if (error_.empty() && updates_ != nullptr) {
      *updates_ = khpc_updates(plan_);
      if (*updates_ < 0) error_ = khpc_last_error();
    }
    if (error_.empty()) {
      SetAvailable arguments = {sizeof arguments, nullptr, future_};
      api_->set_available(&arguments);
    } else {
      SetError arguments = {sizeof arguments, nullptr, future_, new_error(api_, error_)};
      api_->set_error(&arguments);
    }
  }

 private:
  const Api* api_;
  Future* future_ = nullptr;
  std::string error_;
  int plan_;
  int32_t* updates_;
};

// XLA runs the rest of the program on the thread that completes a future. That must not be the communication thread,
// which has other work, so a thread of ours takes over. It lives as long as the process.
class Finisher {
 public:
  Finisher() {
    std::thread([this] { run(); }).detach();
  }
  void post(std::unique_ptr<Completion> completion) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(completion));
    }
    ready_.notify_one();
  }

 private:
  void run() {
#ifdef __SSE__
    _mm_setcsr(_mm_getcsr() | 0x8040);  // denormals are zero, as on XLA's own threads
#endif
    for (;;) {
      std::unique_lock lock(mutex_);
      ready_.wait(lock, [this] { return !queue_.empty(); });
      const std::unique_ptr<Completion> completion = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      completion->finish();
    }
  }

  std::mutex mutex_;
  keras_hpc::Condition ready_;
  std::deque<std::unique_ptr<Completion>> queue_;
};

void finish_elsewhere(void* argument, const char* error) {
  static Finisher& finisher = *new Finisher;
  std::unique_ptr<Completion> completion(static_cast<Completion*>(argument));
  if (error) completion->fail(error);
  finisher.post(std::move(completion));
}

void start(CallFrame& call) {
  if (!is_true(*call.arguments.values[2])) return;
  const int plan = attribute(call, "plan"), tensor = attribute(call, "tensor");
  void* data = call.results.values[0]->data;
  addresses.set(plan, tensor, data);
  check(khpc_start(plan, tensor, data, weight_of(*call.arguments.values[1])));
}

// Lets `begin` (of the engine, asynchronous) complete the call, or, without a communication thread, `block`.
template <class Begin, class Block>
void complete(CallFrame& call, std::unique_ptr<Completion> completion, Begin&& begin, Block&& block) {
  Future* future = completion->future();
  switch (begin(completion.get())) {
    case KHPC_OK:
      static_cast<void>(completion.release());
      break;
    case KHPC_BLOCKING:
      block(*completion);
      completion->finish();
      break;
    default:
      completion->fail(khpc_last_error());
      completion->finish();
  }
  call.future = future;
}

void wait_for_all(CallFrame& call, int plan, int tensors, int32_t* updates) {
  // Also after an error, wait for all tensors: until then the engine writes to these buffers.
  auto completion = std::make_unique<Completion>(call.api, moved_tensors(call, plan, tensors), plan, updates);
  complete(
      call, std::move(completion), [&](Completion* c) { return khpc_wait_all_async(plan, finish_elsewhere, c); },
      [&](Completion& c) {
        for (int tensor = 0; tensor < tensors; ++tensor)
          if (khpc_wait(plan, tensor) != KHPC_OK) c.fail(khpc_last_error());
      });
}

void done(CallFrame& call) {
  if (!is_true(*call.arguments.values[call.arguments.size - 1])) return;
  wait_for_all(call, attribute(call, "plan"), static_cast<int>(call.results.size), nullptr);
}

void turn(CallFrame& call) {
  const auto tensors = static_cast<int>(call.results.size) - 1;
  auto* updates = static_cast<int32_t*>(call.results.values[tensors]->data);
  *updates = 0;
  if (is_true(*call.arguments.values[tensors])) wait_for_all(call, attribute(call, "plan"), tensors, updates);
}

void second(CallFrame& call) {
  const int plan = attribute(call, "plan");
  std::vector<void*> data;
  for (int64_t i = 0; i < call.results.size; ++i) data.push_back(call.results.values[i]->data);
  complete(
      call, std::make_unique<Completion>(call.api, ""),
      [&](Completion* c) { return khpc_second_async(plan, data.data(), finish_elsewhere, c); },
      [&](Completion& c) {
        for (size_t i = 0; i < data.size(); ++i)
          if (khpc_second(plan, static_cast<int>(i), data[i]) != KHPC_OK) c.fail(khpc_last_error());
      });
}

void local_begin(CallFrame& call) {
  const int mode = khpc_local_begin(attribute(call, "plan"), weight_of(*call.arguments.values[1]));
  if (mode < 0) throw std::runtime_error(khpc_last_error());
  *static_cast<int32_t*>(call.results.values[1]->data) = mode;
}

void local_anchor(CallFrame& call) {
  constexpr int32_t anchor = 2;  // of LocalSteps::Mode
  *static_cast<int32_t*>(call.results.values[0]->data) = 0;
  if (*static_cast<const int32_t*>(call.arguments.values[1]->data) & anchor)
    check(khpc_local_anchor(attribute(call, "plan"), attribute(call, "tensor"), call.arguments.values[0]->data));
}

void allreduce(CallFrame& call) {
  const Buffer& x = *call.arguments.values[0];
  const Buffer& y = *call.results.values[0];
  const int64_t count = std::accumulate(x.dims, x.dims + x.rank, int64_t{1}, std::multiplies<>());
  const char* dtype = name_of(x.dtype);
  const bool small = x.dtype == kF16 || x.dtype == kBF16, large = x.dtype == kF64 || x.dtype == kS64;
  if (y.data != x.data && count > 0)
    std::memcpy(y.data, x.data, static_cast<size_t>(count) * (small ? 2 : large ? 8 : 4));
  check(khpc_allreduce_tensor(attribute(call, "team"), y.data, x.dims, static_cast<int>(x.rank), dtype,
                              text_attribute(call, "op").c_str(), text_attribute(call, "what").c_str()));
}

void exchange(CallFrame& call) {
  const Buffer& x = *call.arguments.values[0];
  const Buffer& y = *call.results.values[0];
  const int exchange = attribute(call, "exchange"), axis = attribute(call, "axis"),
            adjoint = attribute(call, "adjoint");
  const int64_t outer = std::accumulate(x.dims, x.dims + axis, int64_t{1}, std::multiplies<>());
  const Buffer& own = adjoint ? y : x;  // the one without padding
  const int64_t inner = std::accumulate(own.dims + axis + 1, own.dims + own.rank, int64_t{1}, std::multiplies<>());
  const int64_t mine = khpc_exchange_rows(exchange), window = khpc_exchange_window(exchange);
  if (mine < 0 || window < 0) throw std::runtime_error(khpc_last_error());
  if (x.dims[axis] != (adjoint ? window : mine) || y.dims[axis] != (adjoint ? mine : window))
    throw std::runtime_error("An exchange got other rows than it was made for.");
  *static_cast<float*>(call.results.values[1]->data) = 0;
  check(khpc_exchange_start(exchange, adjoint, x.data, outer, inner, name_of(x.dtype)));
  check(khpc_exchange_wait(exchange, adjoint, y.data));
}

}  // namespace

extern "C" KHPC_API Error* khpc_jax_start(CallFrame* frame) {
  return call<start>(frame);
}
extern "C" KHPC_API Error* khpc_jax_done(CallFrame* frame) {
  return call<done>(frame);
}
extern "C" KHPC_API Error* khpc_jax_turn(CallFrame* frame) {
  return call<turn>(frame);
}
extern "C" KHPC_API Error* khpc_jax_local_begin(CallFrame* frame) {
  return call<local_begin>(frame);
}
extern "C" KHPC_API Error* khpc_jax_local_anchor(CallFrame* frame) {
  return call<local_anchor>(frame);
}
extern "C" KHPC_API Error* khpc_jax_allreduce(CallFrame* frame) {
  return call<allreduce>(frame);
}
extern "C" KHPC_API Error* khpc_jax_exchange(CallFrame* frame) {
  return call<exchange>(frame);
}
extern "C" KHPC_API Error* khpc_jax_second(CallFrame* frame) {
  return call<second>(frame);
}

}  // namespace keras_hpc::xla
