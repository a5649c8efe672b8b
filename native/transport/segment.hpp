// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
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

// An anonymous file, as another process of this user on this node can find it.
struct SharedFile {
  int32_t pid = 0;
  int32_t descriptor = -1;
};

// A new anonymous file of `nbytes` bytes, none of them reserved yet. More than the control group has left is an error
// here, and no kill later. Returns a descriptor that the caller closes.
int create_shared_file(size_t nbytes);
// Returns a descriptor, or -1 where there is no such file: in a container, numbers may mean other processes.
int open_shared_file(const SharedFile& file);
// Maps the file; the descriptor may be closed afterwards.
void* map_shared_file(int descriptor, size_t nbytes);
// Reserves a part of a mapped file, near the core that calls, and enters it into this process' page tables: both would
// take time in the first step else. So a full machine is an error here.
void reserve_shared_memory(int descriptor, std::byte* data, size_t begin, size_t end);
// Enters a part that another process has reserved into this one's page tables.
void reach_shared_memory(std::byte* data, size_t nbytes);
// The whole pages of it are not inherited by forked children.
void hide_from_children(void* data, size_t nbytes);
void unmap_shared_file(void* data, size_t nbytes);

}  // namespace keras_hpc
