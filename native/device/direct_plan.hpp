// SPDX-License-Identifier: Apache-2.0
// What the ways of a device plan from GPU to GPU have in common: nothing goes through the host, but for tensors that
// are there. Tensors are copied into buckets in the device's memory, which are reduced there, and back.
//
// A step, for each tensor:  start_on   an event is recorded on the caller's stream
// by the courier,           step       the way's own, with copy_in and copy_out
// and in its end:           wait_on    blocks until the device has done all of it
//
// The host waits for the device's end, so that no rank goes on with a step that others cannot end. The order is made by
// events alone:
//   ready[t]  on the caller's stream at start_on; the stream waits for it that copies the tensor into its bucket
//   came      on our stream once a weight has come to the host; the courier asks for it
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/device_plan.hpp"
#include "engine/failure.hpp"
#include "engine/weights.hpp"

namespace keras_hpc {

// Bytes of each rank's part of a bucket, whole lines: the last parts may be shorter, or empty. And where in the bucket
// a rank's is.
size_t part_bytes(const Bucket& bucket, int ranks);
Range part_of(const Bucket& bucket, int ranks, int rank);

class DirectPlan : public DevicePlan {
 public:
  void start_on(int tensor, device::Pointer data, const DeviceWeight& weight, device::StreamHandle stream) final;
  void start(int tensor, const void* data, double weight) final;
  void wait_on(device::StreamHandle stream) final;
  void second_on(const std::vector<device::Pointer>& data, device::StreamHandle stream) final;

 protected:
  // What a courier looks out for, while it waits.
  class Watch {
   public:
    explicit Watch(DirectPlan& plan);
    // To what connecting to the other ranks may take, in place of the team's limit.
    void limit_connecting(const char* hint);
    template <class Ready>
    void until(Ready&& ready, const char* what) {
      while (!ready()) look(what);
    }
    void moved() { moved_at_ = Clock::now(); }  // what is waited for: the limit counts from here
    // `what` the device, or other ranks, have not done; null: it is for this rank's script to go on.
    void look(const char* what);

   private:
    class Others final : public Awaited {
     public:
      explicit Others(const DirectPlan& plan) : plan_(plan) {}
      std::string name() const override {
        return "Step of " + plan_.plan_.what() + ", which GPUs reduce " + plan_.how();
      }
      std::vector<int> missing() const override { return plan_.missing(); }
      Stall stall() const override { return {}; }

     private:
      const DirectPlan& plan_;
    };

    DirectPlan& plan_;
    Others others_;
    Lookout lookout_;
    double limit_;
    const char* hint_ = "the time limit. Do all ranks run the same number of steps?";
    Clock::time_point looked_at_ = Clock::now(), moved_at_ = looked_at_;
  };

  // A sum or mean of floats, in the segment, not pipelined.
  DirectPlan(Team& team, Plan& plan, int ordinal);

  // ---- of the way
  virtual void step(Watch& watch) = 0;
  virtual const char* how() const = 0;                     // "by NCCL"
  virtual const char* have_not() const = 0;                // "NCCL has not"
  virtual std::vector<int> missing() const { return {}; }  // ranks that have not done their part, where that is known
  virtual void begin_step() {}                             // with the lock
  virtual void go_on() {}                                  // while the courier waits
  virtual void throw_if_way_failed() {}
  virtual void abort() {}  // what is under way: its results are worth nothing

  std::vector<const device::Stream*> streams() const override { return {stream_.get()}; }
  void abandon() override;

  const Bucket& bucket(int number) const { return plan_.layout().buckets()[static_cast<size_t>(number)]; }
  int bucket_count() const { return static_cast<int>(plan_.layout().buckets().size()); }
  void serve();  // the courier's work
  bool has_begun(const Bucket& bucket);
  // That this rank has in the step. And what all have, as Plan::know_weights on one node.
  double own_weight(Watch& watch);
  void find_weights_of(const std::vector<double>& of_rank, Weights& found) const;
  // Between its tensors and a bucket's place in the device's memory. In: once they are ready.
  void copy_in(int bucket, device::Pointer to, device::StreamHandle stream);
  void copy_out(int bucket, device::Pointer from, device::StreamHandle stream);

  std::unique_ptr<device::Stream> stream_;

 private:
  struct Tensor {
    explicit Tensor(const device::Device& device) : ready(device) {}
    device::Event ready;
    device::Pointer data = 0;  // 0: on the host
  };

  std::byte* place(int tensor) const { return memory_.get() + plan_.layout().range(tensor).begin; }
  Tensor& of(int tensor) { return *tensors_[static_cast<size_t>(tensor)]; }
  void begin(int tensor, const DeviceWeight& weight);
  template <class F>
  void for_parts(int number, device::Pointer memory, F&& f);

  const std::shared_ptr<std::byte> memory_;  // the plan's; it may outlive it
  const std::shared_ptr<std::byte> weight_place_;
  std::unique_ptr<device::Pinned> pinned_, pinned_weight_;
  std::unique_ptr<device::Event> came_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
};

}  // namespace keras_hpc
