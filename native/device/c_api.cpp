// SPDX-License-Identifier: Apache-2.0
// The C interface for tensors on a GPU.
#include "engine/c_api.hpp"

#include "device/device_call.hpp"
#include "device/device_plan.hpp"
#include "keras_hpc/engine.h"

using namespace keras_hpc;
using namespace keras_hpc::c_api;

namespace {

// Holds the team and the plan, too, for as long as the caller works with the device.
registry::PlanEntry find_device(int plan) {
  registry::PlanEntry entry = registry::plan(plan);
  if (entry.device == nullptr) throw Error("The tensors of plan '" + entry.plan->name() + "' are not on a GPU.");
  return entry;
}

device::StreamHandle stream_of(void* stream) {
  return static_cast<device::StreamHandle>(stream);
}

device::Pointer pointer_of(const void* address) {
  return reinterpret_cast<device::Pointer>(address);
}

}  // namespace

int khpc_start_on(int plan, int tensor, void* data, const void* weight, int weight_nbytes, void* stream) {
  return guarded(
      [&]() -> int {
        find(plan, tensor);  // there is such a tensor
        expect(weight == nullptr || weight_nbytes == 4 || weight_nbytes == 8, "a weight of 4 or 8 bytes");
        const auto entry = find_device(plan);
        entry.device->start_on(tensor, pointer_of(data), {1, pointer_of(weight), static_cast<size_t>(weight_nbytes)},
                               stream_of(stream));
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_wait_on(int plan, void* stream) {
  return guarded(
      [&]() -> int {
        find_device(plan).device->wait_on(stream_of(stream));
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_lend(int plan, int tensor, const void* data, double weight, void** lent, void** loan) {
  return guarded(
      [&]() -> int {
        find(plan, tensor);  // there is such a tensor
        expect(lent != nullptr && loan != nullptr, "places for what is lent");
        const auto made = find_device(plan).device->lend(tensor, pointer_of(data), weight);
        *lent = reinterpret_cast<void*>(made.data);
        *loan = new device::Loan(made);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

void khpc_give_back(void* loan) {
  delete static_cast<device::Loan*>(loan);
}

int khpc_second_on(int plan, void* const* data, void* stream) {
  return guarded(
      [&]() -> int {
        const auto entry = find_device(plan);
        std::vector<device::Pointer> pointers;
        for (int i = 0; i < entry.plan->layout().tensor_count(); ++i) pointers.push_back(pointer_of(data[i]));
        entry.device->second_on(pointers, stream_of(stream));
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_write_updates(int plan, void* to, void* stream) {
  return guarded(
      [&]() -> int {
        find_device(plan).device->write_updates(pointer_of(to), stream_of(stream));
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_finish_on(int plan) {
  return guarded(
      [&]() -> int {
        find_device(plan).device->finish();
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_allreduce_on(int team, int device, void* data, const int64_t* shape, int rank, const char* dtype,
                      const char* op, const char* what, void* stream) {
  return guarded(
      [&]() -> int {
        allreduce_on(registry::team(team), device, pointer_of(data), parse_dtype(text(dtype, "dtype")),
                     parse_op(text(op, "op")), text(what, "what"), {shape, shape + rank}, stream_of(stream));
        return KHPC_OK;
      },
      KHPC_ERROR);
}
