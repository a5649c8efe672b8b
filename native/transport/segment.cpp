// SPDX-License-Identifier: Apache-2.0
#include "transport/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "common/error.hpp"

namespace keras_hpc {

int create_shared_file(size_t nbytes) {
  const int fd = memfd_create("keras_hpc", MFD_CLOEXEC);
  if (fd < 0) throw Error(std::string("Cannot create shared memory (memfd_create): ") + std::strerror(errno));
  // Other users cannot reach it through /proc anyway, where nobody has weakened that.
  if (fchmod(fd, S_IRUSR | S_IWUSR) != 0) {
    close(fd);
    throw Error(std::string("Cannot make shared memory private (fchmod): ") + std::strerror(errno));
  }
  const int failure = posix_fallocate(fd, 0, static_cast<off_t>(nbytes));
  if (failure != 0) {
    close(fd);
    throw Error("Cannot reserve " + std::to_string(nbytes >> 20) +
                " MiB of shared memory for communication: " + std::strerror(failure));
  }
  return fd;
}

int open_shared_file(int pid, int descriptor) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

void* map_shared_file(int descriptor, size_t nbytes) {
  // MAP_POPULATE: page faults inside a training step would cost four times as much as the copy itself.
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  if (data == MAP_FAILED) throw Error(std::string("Cannot map shared memory: ") + std::strerror(errno));
  return data;
}

void unmap_shared_file(void* data, size_t nbytes) {
  munmap(data, nbytes);
}

}  // namespace keras_hpc
