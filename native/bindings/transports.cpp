// SPDX-License-Identifier: Apache-2.0
#include "bindings/transports.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "mpi/library.hpp"
#include "transport/in_process.hpp"
#include "transport/mpi_transport.hpp"

namespace keras_hpc {
namespace {

// The MPI library as mpi4py knows it, and a communicator. Duplicated where it is used.
class PyMpi {
 public:
  PyMpi(const std::string& module_path, int handle_size, intptr_t comm,
        const std::map<std::string, intptr_t>& constants, const std::map<std::string, intptr_t>& dtypes,
        const std::map<std::string, intptr_t>& ops)
      : module_path_(module_path), handle_size_(handle_size), comm_(comm), constants_{constants.at("BYTE"),
                                                                                      constants.at("ERRORS_RETURN"),
                                                                                      constants.at("STATUS_IGNORE"),
                                                                                      constants.at("IN_PLACE"),
                                                                                      {},
                                                                                      {}} {
    for (const auto& [name, handle] : dtypes) constants_.dtypes[parse_dtype(name)] = handle;
    for (const auto& [name, handle] : ops) constants_.ops[parse_op(name)] = handle;
  }
  std::vector<int> nodes(const std::vector<int>& host_of_rank) const {
    return nodes_that_share_memory(*connect(), host_of_rank);
  }
  std::unique_ptr<Transport> transport(const std::vector<int>& node_of_rank, size_t largest_message) const {
    return make_mpi_transport(connect(), node_of_rank, largest_message);
  }

 private:
  std::unique_ptr<mpi::Communicator> connect() const {
    return mpi::connect(module_path_, handle_size_, comm_, constants_);
  }

  std::string module_path_;
  int handle_size_;
  intptr_t comm_;
  mpi::Constants constants_;
};

}  // namespace

void bind_transports(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Transport>(m, "Transport");
  nb::class_<PyMpi>(m, "Mpi")
      .def(nb::init<const std::string&, int, intptr_t, const std::map<std::string, intptr_t>&,
                    const std::map<std::string, intptr_t>&, const std::map<std::string, intptr_t>&>(),
           "module_path"_a, "handle_size"_a, "comm"_a, "constants"_a, "dtypes"_a, "ops"_a,
           "Collective: a communicator of the MPI library that mpi4py has loaded.")
      .def("nodes", &PyMpi::nodes, release, "host_of_rank"_a,
           "Collective: the node of each rank. Ranks of a host that cannot share memory are not on one.")
      .def("transport", &PyMpi::transport, release, "node_of_rank"_a, "largest_message"_a = kLargestMessage,
           "Collective: a way to reach the ranks. Messages of more bytes than `largest_message` go in parts.");
  m.def(
      "in_process_transports",
      [](const std::vector<int>& node_of_rank, uintptr_t copy) {
        nb::list transports;
        for (auto& transport : make_in_process_transports(node_of_rank, reinterpret_cast<CopyFunction>(copy)))
          transports.append(nb::cast(std::move(transport)));
        return transports;
      },
      "node_of_rank"_a, "copy"_a = 0,
      "One transport per rank; ranks are threads of this process. `copy`: the address of a void(void*, const void*, "
      "size_t) that copies messages which may be in memory of GPUs.");
}

}  // namespace keras_hpc
