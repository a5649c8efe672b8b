// SPDX-License-Identifier: Apache-2.0
// Times allreduces and training steps of the engine on simulated nodes, one rank on each; smpirun starts it with the
// options of options.hpp.
#include <mpi.h>

#include <cstdio>
#include <simgrid/s4u.hpp>
#include <string>

#include "common/error.hpp"
#include "common/index.hpp"
#include "simulator/measure.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kCopiedBytes = 4096;  // of a message; longer ones are gradients, of which only the size matters

// Of gradients no byte is looked at.
void copy_small(simgrid::kernel::activity::CommImpl* message, void* data, size_t nbytes) {
  if (nbytes <= kCopiedBytes) smpi_comm_copy_buffer_callback(message, data, nbytes);
}

}  // namespace
}  // namespace keras_hpc

int main(int count, char** words) {
  using namespace keras_hpc;
  MPI_Init(&count, &words);
  // SimGrid 3.32 declares this parameter with a base of the class that its own function takes.
  smpi_comm_set_copy_data_callback(reinterpret_cast<void (*)(smx_activity_t, void*, size_t)>(copy_small));
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  try {
    const size_t hosts = simgrid::s4u::Engine::get_instance()->get_host_count();
    if (hosts < at(size))
      throw Error("The platform has too few hosts. Expected " + std::to_string(size) +
                  " or more. Received: " + std::to_string(hosts));
    const Options options(count, words);
    int me = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    options.of_library() ? time_library(options, me, size) : time_engine(options, size);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
