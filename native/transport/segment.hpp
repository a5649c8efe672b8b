// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <functional>

namespace keras_hpc {

// Memory shared by the ranks of one node, zero at first. The owner's descriptor is an anonymous file (memfd), which no
// name in the file system refers to: a killed job leaves nothing behind, and /dev/shm may be small.
class Segment {
 public:
  Segment(void* data, size_t nbytes, std::function<void()> release)
      : data_(static_cast<std::byte*>(data)), nbytes_(nbytes), release_(std::move(release)) {}
  ~Segment() { release_(); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  std::byte* data_;
  size_t nbytes_;
  std::function<void()> release_;
};

// A new anonymous file of `nbytes` bytes; its memory is reserved, so that a full machine is an error here and not a
// crash later. Returns a descriptor that the caller closes.
int create_shared_file(size_t nbytes);
// Opens the anonymous file of another process of this user on this node. Returns a descriptor or -1.
int open_shared_file(int pid, int descriptor);
// Maps the file; the descriptor may be closed afterwards.
void* map_shared_file(int descriptor, size_t nbytes);
void unmap_shared_file(void* data, size_t nbytes);

}  // namespace keras_hpc
