// SPDX-License-Identifier: Apache-2.0
// The MPI library that mpi4py has loaded, bound at run time. Nothing here needs mpi.h, so one binary serves every MPI:
// symbols come by dlsym through mpi4py's own extension module (which searches exactly the libraries it is linked to),
// handles and constants come from mpi4py, and the two ABIs in use differ only in the size of a handle (4 bytes in the
// MPICH family, a pointer in Open MPI).
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/dtype.hpp"
#include "transport/transport.hpp"

namespace keras_hpc::mpi {

// Values that differ between MPI libraries, as mpi4py knows them. Handles are sign-extended.
struct Constants {
  intptr_t byte;                     // MPI_BYTE
  intptr_t errors_return;            // MPI_ERRORS_RETURN
  intptr_t status_ignore;            // MPI_STATUS_IGNORE
  intptr_t in_place;                 // MPI_IN_PLACE
  std::map<DType, intptr_t> dtypes;  // those that MPI has
  std::map<Op, intptr_t> ops;
};

// Whether a call has failed in this process. MPICH over UCX may crash in the next message then.
bool has_failed();

// A communicator, owned: freed with the object unless MPI has already been finalized.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // From now on neither this one nor those that are made of it are ever freed: messages may come that nobody receives,
  // and MPI could give their context to another communicator, which would.
  virtual void keep() = 0;
  // Collective. The new communicator returns errors instead of aborting, so that they become exceptions.
  virtual std::unique_ptr<Communicator> duplicate() const = 0;
  // Collective. One of those that pass the same color, in the order of their keys.
  virtual std::unique_ptr<Communicator> split(int color, int key) const = 0;
  virtual RequestPtr send(const void* data, int count, int peer, int tag) = 0;
  virtual RequestPtr receive(void* data, int count, int peer, int tag) = 0;
  virtual RequestPtr broadcast(void* data, int count, int root) = 0;
  virtual RequestPtr allgather(const void* in, int count, void* out, std::vector<int> counts) = 0;
  virtual RequestPtr barrier() = 0;
  virtual bool can_allreduce(DType dtype, Op op) const = 0;
  // In place.
  virtual void allreduce(void* data, int count, DType dtype, Op op) = 0;
  virtual RequestPtr iallreduce(void* data, int count, DType dtype, Op op) = 0;
  // Whether the library says that it sends and receives memory of CUDA's devices.
  virtual bool takes_device_memory() const = 0;
};

// Collective: duplicates the communicator `handle` of the library behind `module_path` (mpi4py.MPI.__file__), or of the
// one that the program itself is linked to, if that is empty.
std::unique_ptr<Communicator> connect(const std::string& module_path, int handle_size, intptr_t handle,
                                      const Constants& constants);

}  // namespace keras_hpc::mpi
