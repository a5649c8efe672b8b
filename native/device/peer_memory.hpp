// SPDX-License-Identifier: Apache-2.0
// Memory of a node's GPUs, of which each rank has allocated a part, and which the kernels of all of them read and write
// (CUDA's inter-process memory). Ranks tell each other on the host, in memory of the node, how far they are.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "engine/area.hpp"
#include "transport/topology.hpp"

namespace keras_hpc::device {

class PeerMemory {
 public:
  // What a rank counts: buckets, over all steps.
  enum class Stage { filled, summed };
  static constexpr int kStages = 2;

  // Of the area that it needs.
  static size_t area_bytes();
  // For a rank that has no part to show: the others' `connect` throws Error with its reason.
  static void refuse(const Area& area, const Topology& topology, const std::string& reason);

  // Allocates this rank's part. `area` was made for this alone. Throws DriverError.
  PeerMemory(int ordinal, std::shared_ptr<Area> area, const Topology& topology, size_t nbytes);
  ~PeerMemory();  // leaves
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Opens the others' parts. `look` is called again and again while it waits for them, and throws if there is no use in
  // that. Throws Error where a rank has none, or where this device cannot reach one.
  void connect(const std::function<void()>& look);
  Pointer of(int local_rank) const { return parts_[static_cast<size_t>(local_rank)]; }

  void tell(Stage stage, uint64_t count);
  bool all_have(Stage stage, uint64_t count) const;
  std::vector<int> behind(Stage stage, uint64_t count) const;  // ranks of the job that have not
  // Of a rank in the step that it has begun; told before it has filled the step's first bucket.
  void set_weight(double weight);
  double weight_of(int local_rank) const;

  // Once this rank's kernels are over. Those of others may still write to its part, which is given back when they have
  // left, too: now, if they do so within a second, or before another part is allocated.
  void leave();
  void abandon();  // the device may still work on it: it is never given back

 private:
  enum class State : uint32_t { unknown, shown, refused };
  struct Mailbox;  // of one rank
  struct Part;
  static void free_what_all_have_left();
  Mailbox& mailbox(int local_rank) const;

  std::shared_ptr<Part> mine_;
  const Topology topology_;
  std::vector<Pointer> parts_;   // [local rank]; 0: not open
  std::vector<Pointer> opened_;  // of other processes
};

// Bytes per second of copies from the GPU of the node's next rank to this rank's. Collective on the node; `area` as for
// PeerMemory. Throws Error where a rank has no memory, or this device cannot reach it.
double measure_peer_speed(int ordinal, const std::shared_ptr<Area>& area, const Topology& topology, size_t nbytes);

}  // namespace keras_hpc::device
