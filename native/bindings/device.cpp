// SPDX-License-Identifier: Apache-2.0
#include "bindings/device.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "device/device_call.hpp"
#include "device/mpi_plan.hpp"
#include "device/nccl_plan.hpp"
#include "device/nvrtc_api.hpp"
#include "device/peer_plan.hpp"
#include "device/staged_plan.hpp"

namespace keras_hpc {
namespace {

device::StreamHandle stream_of(uintptr_t stream) {
  return reinterpret_cast<device::StreamHandle>(stream);
}

std::shared_ptr<DevicePlan> device_of(const PyPlan& plan) {
  const auto found = registry::plan(plan.id).device;
  if (found == nullptr) throw Error("The tensors of plan '" + plan.open().plan->name() + "' are not on a GPU.");
  return found;
}

// An array in a GPU's memory, for who has no framework: benchmarks.
class DeviceArray {
 public:
  DeviceArray(int ordinal, size_t nbytes)
      : device_(ordinal),
        buffer_(device_, nbytes),
        stream_(device_),
        event_(device_),
        host_(device::pages(nbytes)),
        pinned_(device_, host_.get(), nbytes) {}
  uintptr_t address() const { return buffer_.data(); }
  uintptr_t stream() const { return reinterpret_cast<uintptr_t>(stream_.handle()); }
  void write(const ConstBytes& from) {
    check(from.size());
    std::memcpy(host_.get(), from.data(), from.size());
    const device::Current current(device_);
    device_.check(device_.api().copy_to_device(buffer_.data(), host_.get(), from.size(), stream_.handle()),
                  "cuMemcpyHtoDAsync");
    finish();
  }
  void read(const Bytes& to) {
    check(to.size());
    const device::Current current(device_);
    device_.check(device_.api().copy_to_host(host_.get(), buffer_.data(), to.size(), stream_.handle()),
                  "cuMemcpyDtoHAsync");
    finish();
    std::memcpy(to.data(), host_.get(), to.size());
  }
  // Blocks until its stream has done what it was given.
  void finish() {
    const device::Current current(device_);
    event_.record(stream_.handle());
    while (!event_.is_over()) std::this_thread::yield();
  }

 private:
  void check(size_t nbytes) const {
    if (nbytes > buffer_.nbytes()) throw nb::value_error("The array on the GPU is smaller.");
  }
  const device::Device device_;
  const device::Buffer buffer_;
  const device::Stream stream_;
  device::Event event_;
  const std::shared_ptr<std::byte> host_;
  const device::Pinned pinned_;
};

void attach(const OpenPlan& open, const std::shared_ptr<DevicePlan>& made) {
  open.team->attach(made);
  registry::set_device(open.plan.get(), made);
}

void open_device(const PyPlan& plan, int ordinal) {
  const OpenPlan open = plan.open();
  const nb::gil_scoped_release released;
  attach(open, std::make_shared<StagedPlan>(*open.team, *open.plan, open.of_pipeline.get(), ordinal));
}

void open_nccl(const PyPlan& plan, int ordinal, const nb::bytes& id, const PyTeam* peers) {
  const OpenPlan open = plan.open();
  device::NcclId found;
  if (id.size() != sizeof found.bytes) throw nb::value_error("Expected the bytes that nccl_id returned.");
  std::memcpy(found.bytes, id.c_str(), sizeof found.bytes);
  const auto team = peers == nullptr ? nullptr : peers->get();
  WithoutGil()([&] {
    // First what is collective on the peers: what follows may fail on this rank alone.
    const auto parts = team == nullptr ? nullptr : BetweenNodes::make_plan(*team, *open.plan, open.team->topology());
    attach(open, std::make_shared<NcclPlan>(*open.team, *open.plan, ordinal, found, NcclPlan::Peers{team, parts}));
  });
}

// Calls f(area), with what ranks show each other their GPUs' memory by; where it fails, the others are told.
// Collective.
template <class F>
auto sharing_memory(Team& team, F&& f) {
  const auto area = team.make_area(device::PeerMemory::area_bytes());
  try {
    return f(area);
  } catch (const std::exception& error) {
    const Topology& topology = team.topology();
    device::PeerMemory::refuse(*area, topology, "rank " + std::to_string(topology.rank) + ": " + error.what());
    throw;
  }
}

void open_peer(const PyPlan& plan, int ordinal, const std::string& nvrtc_path) {
  const OpenPlan open = plan.open();
  WithoutGil()([&] {
    sharing_memory(*open.team, [&](const std::shared_ptr<Area>& area) {
      device::nvrtc(nvrtc_path);
      attach(open, std::make_shared<PeerPlan>(*open.team, *open.plan, ordinal, area));
    });
  });
}

void open_mpi(const PyPlan& plan, int ordinal, const std::string& nvrtc_path) {
  const OpenPlan open = plan.open();
  WithoutGil()([&] {
    auto channel = open.team->open_channel();  // first what is collective: what follows may fail on this rank alone
    device::nvrtc(nvrtc_path);
    attach(open, std::make_shared<MpiPlan>(*open.team, *open.plan, ordinal, std::move(channel)));
  });
}

double peer_speed(const PyTeam& owner, int ordinal, size_t nbytes) {
  const auto team = owner.get();
  return WithoutGil()([&] {
    return sharing_memory(*team, [&](const std::shared_ptr<Area>& area) {
      return device::measure_peer_speed(ordinal, area, team->topology(), nbytes);
    });
  });
}

}  // namespace

void bind_device(nb::module_& m, nb::class_<PyPlan>& plan) {
  plan.def("open_device", &open_device, "ordinal"_a,
           "From now on its tensors are on this GPU. Fails on this rank alone.")
      .def("open_nccl", &open_nccl, "ordinal"_a, "id"_a, "peers"_a = nb::none(),
           "Collective. The same, reduced by NCCL from GPU to GPU; `id` is what nccl_id returned on one rank. `peers`: "
           "a team of the ranks with this rank's number on their nodes, which reduces between nodes; NCCL then "
           "connects those of a node, each with an `id` of its own.")
      .def("open_peer", &open_peer, "ordinal"_a, "nvrtc_path"_a = "",
           "Collective. The same, reduced from GPU to GPU by a kernel, on one node. `nvrtc_path`: as of load_nvrtc.")
      .def("open_mpi", &open_mpi, "ordinal"_a, "nvrtc_path"_a = "",
           "Collective. The same, sent from GPU to GPU by MPI, which takes their memory, and added up by a kernel.")
      .def("close_device",
           [](const PyPlan& plan) {
             const OpenPlan open = plan.open();
             const nb::gil_scoped_release released;
             registry::set_device(open.plan.get(), nullptr);
             open.team->end_attendants(open.plan.get());
           })
      .def(
          "start_on",
          [](const PyPlan& plan, int tensor, uintptr_t address, size_t nbytes, double weight, uintptr_t stream) {
            const OpenPlan open = plan.open();
            open.check(tensor, nbytes);
            const auto device = device_of(plan);
            const nb::gil_scoped_release released;
            device->start_on(tensor, address, DeviceWeight{weight}, stream_of(stream));
          },
          "tensor"_a, "address"_a, "nbytes"_a, "weight"_a, "stream"_a)
      .def(
          "start_beside",
          [](const PyPlan& plan, int tensor, const Bytes& data, double weight) {
            const OpenPlan open = plan.open();
            open.check(tensor, data.size());
            const auto device = device_of(plan);
            const nb::gil_scoped_release released;
            device->start(tensor, data.data(), weight);
          },
          "tensor"_a, "data"_a.noconvert(), "weight"_a,
          "A tensor on the host, whose mean will be in the plan's memory.")
      .def(
          "start_zeros",
          [](const PyPlan& plan, int tensor, double weight) {
            const OpenPlan open = plan.open();
            open.check(tensor);
            const auto device = device_of(plan);
            const nb::gil_scoped_release released;
            device->start(tensor, nullptr, weight);
          },
          "tensor"_a, "weight"_a)
      .def(
          "wait_on",
          [](const PyPlan& plan, uintptr_t stream) {
            const OpenPlan open = plan.open();
            const auto device = device_of(plan);
            WithoutGil()([&] { device->wait_on(stream_of(stream)); });
          },
          "stream"_a)
      .def(
          "second_on",
          [](const PyPlan& plan, const std::vector<uintptr_t>& addresses, uintptr_t stream) {
            const OpenPlan open = plan.open();
            if (addresses.size() != open.plan->tensors().size())
              throw nb::value_error("Expected an address for each tensor of the plan.");
            const auto device = device_of(plan);
            WithoutGil()([&] { device->second_on({addresses.begin(), addresses.end()}, stream_of(stream)); });
          },
          "addresses"_a, "stream"_a, "Address 0: a tensor that is not wanted.");

  nb::class_<DeviceArray>(m, "DeviceArray", "Memory of a GPU, and a stream.")
      .def(nb::init<int, size_t>(), "ordinal"_a, "nbytes"_a)
      .def_prop_ro("address", &DeviceArray::address)
      .def_prop_ro("stream", &DeviceArray::stream)
      .def("write", &DeviceArray::write, "data"_a.noconvert())
      .def("read", &DeviceArray::read, "data"_a.noconvert())
      .def("finish", &DeviceArray::finish, "Blocks until the stream has done what it was given.");

  m.def(
      "allreduce_on",
      [](const PyTeam& owner, int ordinal, uintptr_t address, const std::string& dtype, const std::string& op,
         const std::string& what, const std::vector<int64_t>& shape, uintptr_t stream) {
        const auto team = owner.get();
        WithoutGil()([&] {
          allreduce_on(team, ordinal, address, parse_dtype(dtype), parse_op(op), what, shape, stream_of(stream));
        });
      },
      "team"_a, "ordinal"_a, "address"_a, "dtype"_a, "op"_a, "what"_a, "shape"_a, "stream"_a,
      "Team.allreduce of contiguous memory of a GPU, in place: what the stream is given from then on finds the "
      "result.");
  m.def(
      "visible_devices",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string>> rows;
        for (const device::Description& d : device::visible_devices()) rows.emplace_back(d.name, d.uuid, d.bus_id);
        return rows;
      },
      "(name, uuid, bus id) of all GPUs that this process sees; none without a driver.");
  m.def(
      "device_speeds",
      [](int ordinal, size_t nbytes) {
        const nb::gil_scoped_release released;
        const device::Speeds speeds = device::measure_speeds(ordinal, nbytes);
        return std::make_tuple(speeds.to_host, speeds.to_device);
      },
      "ordinal"_a, "nbytes"_a, "Bytes per second from a GPU to pinned memory, and back, in copies of so many bytes.");
  m.def("peer_speed", &peer_speed, "team"_a, "ordinal"_a, "nbytes"_a,
        "Collective. Bytes per second from the GPU of the node's next rank to this one's, in copies of so many bytes.");
  m.def(
      "load_nccl",
      [](const std::string& path) {
        device::nccl(path);
        return device::nccl_version();
      },
      "path"_a = "",
      "The version, such as 23004, of the NCCL that this process has loaded, else of that at `path`, else the "
      "system's.");
  m.def(
      "load_nvrtc",
      [](const std::string& path) {
        int major = 0, minor = 0;
        if (device::nvrtc(path).version(&major, &minor) != 0) throw Error("NVRTC does not tell its version.");
        return std::make_tuple(major, minor);
      },
      "path"_a = "",
      "The version, such as (12, 9), of the NVRTC that this process has loaded, else of that at `path`, else the "
      "system's.");
  m.def("nccl_id", [] {
    const device::NcclId id = device::new_nccl_id();
    return nb::bytes(id.bytes, sizeof id.bytes);
  });
  m.def("pinned_bytes", &device::pinned_bytes, "Memory of this process that is pinned for GPUs.");
  m.def(
      "device_driver_version",
      [] {
        int version = 0;
        if (const device::Api* api = device::driver()) api->version(&version);
        return version;
      },
      "Of CUDA, such as 13000; 0 without a driver.");
}

}  // namespace keras_hpc
