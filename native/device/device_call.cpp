// SPDX-License-Identifier: Apache-2.0
#include "device/device_call.hpp"

#include <chrono>
#include <functional>
#include <numeric>
#include <thread>

#include "device/device.hpp"

namespace keras_hpc {
namespace {

void await(const device::Event& event) {
  while (!event.is_over()) std::this_thread::sleep_for(std::chrono::microseconds(10));
}

}  // namespace

void allreduce_on(Team& team, int ordinal, device::Pointer data, DType dtype, Op op, const std::string& what,
                  const std::vector<int64_t>& shape, device::StreamHandle stream) {
  const int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  const size_t nbytes = static_cast<size_t>(count) * size_of(dtype);
  if (team.topology().size == 1) return;
  if (nbytes == 0) return team.allreduce(nullptr, 0, dtype, op, std::nullopt, std::nullopt, what, shape);
  const device::Device device(ordinal);
  const device::Current current(device);
  std::vector<std::byte> host(nbytes);
  const device::Pinned pinned(device, host.data(), nbytes);
  device::Event event(device);
  device.check(device.api().copy_to_host(host.data(), data, nbytes, stream), "cuMemcpyDtoHAsync");
  event.record(stream);
  await(event);
  team.allreduce(host.data(), count, dtype, op, std::nullopt, std::nullopt, what, shape);
  device.check(device.api().copy_to_device(data, host.data(), nbytes, stream), "cuMemcpyHtoDAsync");
  event.record(stream);
  await(event);
}

}  // namespace keras_hpc
