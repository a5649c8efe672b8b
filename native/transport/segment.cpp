// SPDX-License-Identifier: Apache-2.0
#include "transport/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "common/control_group.hpp"
#include "common/error.hpp"
#include "common/pages.hpp"

namespace keras_hpc {
namespace {

constexpr char kName[] = "keras_hpc";
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, of Linux 5.14, which older headers do not have

std::string mebibytes(uint64_t nbytes) {
  return std::to_string(nbytes >> 20) + " MiB";
}

Error cannot_reserve(size_t nbytes, int failure) {
  return Error("Cannot reserve " + mebibytes(nbytes) +
               " of shared memory for communication: " + std::strerror(failure));
}

}  // namespace

int create_shared_file(size_t nbytes) {
  // The kernel reserves more than a control group allows, and then kills.
  const ControlGroup group = ControlGroup::mine();
  if (nbytes > group.memory_left)
    throw Error("Cannot reserve " + mebibytes(nbytes) + " of shared memory for communication: the control group of " +
                "this container or batch job (memory.max) has " + mebibytes(group.memory_left) + " left of " +
                mebibytes(group.memory_limit) + ".");
  const int fd = memfd_create(kName, MFD_CLOEXEC);
  if (fd < 0) throw Error(std::string("Cannot create shared memory (memfd_create): ") + std::strerror(errno));
  // Other users cannot reach it through /proc anyway, where nobody has weakened that.
  if (fchmod(fd, S_IRUSR | S_IWUSR) != 0) {
    close(fd);
    throw Error(std::string("Cannot make shared memory private (fchmod): ") + std::strerror(errno));
  }
  if (ftruncate(fd, static_cast<off_t>(nbytes)) != 0) {
    const int failure = errno;
    close(fd);
    throw cannot_reserve(nbytes, failure);
  }
  return fd;
}

int open_shared_file(const SharedFile& file) {
  const std::string path = "/proc/" + std::to_string(file.pid) + "/fd/" + std::to_string(file.descriptor);
  char target[64] = {};
  if (readlink(path.c_str(), target, sizeof target - 1) < 0) return -1;
  if (std::string(target).rfind(std::string("/memfd:") + kName, 0) != 0) {
    errno = ENOENT;  // of another process that has the same number
    return -1;
  }
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

void* map_shared_file(int descriptor, size_t nbytes) {
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) throw Error(std::string("Cannot map shared memory: ") + std::strerror(errno));
  madvise(data, nbytes, MADV_HUGEPAGE);  // where the administrator lets shared memory have them (shmem_enabled)
  return data;
}

void reserve_shared_memory(int descriptor, std::byte* data, size_t begin, size_t end) {
  begin = begin / page_size() * page_size();
  if (begin >= end) return;
  if (madvise(data + begin, end - begin, kPopulateWrite) == 0) return;
  if (errno != EINVAL) throw cannot_reserve(end - begin, errno);
  const int failure = posix_fallocate(descriptor, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  if (failure != 0) throw cannot_reserve(end - begin, failure);
  reach_shared_memory(data + begin, end - begin);
}

void reach_shared_memory(std::byte* data, size_t nbytes) {
  for (size_t page = 0; page < nbytes; page += page_size())
    static_cast<void>(*static_cast<volatile std::byte*>(data + page));
}

void hide_from_children(void* data, size_t nbytes) {
  // Whole pages, so that none is lost that has something else, too.
  if (nbytes >= page_size()) madvise(data, nbytes / page_size() * page_size(), MADV_DONTFORK);
}

void unmap_shared_file(void* data, size_t nbytes) {
  munmap(data, nbytes);
}

}  // namespace keras_hpc
