// SPDX-License-Identifier: Apache-2.0
// The way of a device plan from GPU to GPU by an MPI library that sends and receives memory of GPUs, and the engine's
// kernel: for ranks on any nodes. Each rank owns a part of every bucket, which it adds up in the order of the ranks.
//
// A step of the courier, for each bucket in turn, each stage as soon as it can be:
//   fill     once its tensors have been started, a stream copies them into the bucket
//   scatter  each other rank is sent its part of it, and this rank's parts of theirs come in
//   sum      a kernel adds these up, in this rank's part of the bucket
//   gather   each other rank is sent the sum, and theirs come into the bucket
//   back     the bucket is copied to the tensors
// MPI knows no streams: it is given what the device has done, and the device what has come. No stream ever waits for
// another rank. The order is made by events alone, those of direct_plan.hpp and
//   filled[b]  on the stream that fills, after its copies; the courier asks for it before it sends
//   summed[b]  on the stream that adds up, after the kernel; the same
//   end        on that stream after the last copy back; the courier asks for it
#pragma once
#include <memory>
#include <vector>

#include "device/direct_plan.hpp"
#include "device/sum_kernel.hpp"
#include "transport/pending.hpp"

namespace keras_hpc {

class MpiPlan final : public DirectPlan {
 public:
  // `channel` was opened for this plan alone. Throws Error where MPI does not take memory of GPUs, or where the device,
  // its memory or the kernel cannot be had; on this rank alone.
  MpiPlan(Team& team, Plan& plan, int ordinal, std::unique_ptr<Channel> channel);
  ~MpiPlan() override;

 private:
  struct Memory;   // of the device, that messages are in
  struct Numbers;  // the ranks' weights

  void step(Watch& watch) override;
  const char* how() const override { return "by MPI"; }
  const char* have_not() const override { return "Not all ranks have"; }
  std::vector<int> missing() const override;
  std::vector<const device::Stream*> streams() const override { return {stream_.get(), sums_.get()}; }
  void abort() override;
  void abandon() override;

  Range part(int number, int rank) const { return part_of(bucket(number), team_.topology().size, rank); }
  device::Pointer place_of(int number) const;
  device::Pointer received_from(int number, int rank) const;
  std::unique_ptr<Pending>& begin_messages(std::vector<std::unique_ptr<Pending>>& of_buckets, int number);
  bool have_come(const std::unique_ptr<Pending>& messages);
  void weigh(double mine);
  void receive_parts(int number);
  void send_parts(int number);
  bool knows_weights();
  void add_up(int number);
  void receive_sums(int number);
  void send_sum(int number);

  std::unique_ptr<Channel> channel_;
  std::shared_ptr<Memory> memory_;
  std::shared_ptr<Numbers> numbers_;
  std::vector<size_t> begins_, received_begins_;  // [bucket] in the memory
  std::unique_ptr<device::Stream> sums_;
  std::vector<std::unique_ptr<device::Event>> filled_, summed_;  // [bucket]
  std::unique_ptr<device::Event> end_;
  std::unique_ptr<device::SumKernel> kernel_;

  // The courier's, of this step.
  std::unique_ptr<Pending> weighing_;                         // null: all weights are known
  std::vector<std::unique_ptr<Pending>> scatters_, gathers_;  // [bucket]
  const Pending* awaited_ = nullptr;
  Weights weights_;
};

}  // namespace keras_hpc
