// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstring>

#include "algorithms/allreduce.hpp"

namespace keras_hpc {
namespace {

class RecursiveDoubling final : public Allreduce {
 public:
  explicit RecursiveDoubling(const AllreduceArgs& args)
      : a_(args), nbytes_(args.count * size_of(args.dtype)), received_(nbytes_) {
    const int p = static_cast<int>(a_.peers.size());
    while (2 * power_ <= p) power_ *= 2;
    const int extra = p - power_;
    // Where p is no power of two, each of the last `extra` ranks hands its data to a partner and gets the result back.
    if (a_.me >= power_)
      steps_ = {{a_.me - power_, Kind::hand_over}, {a_.me - power_, Kind::get_result}};
    else {
      if (a_.me < extra) steps_.push_back({a_.me + power_, Kind::take_over});
      for (int mask = 1; mask < power_; mask *= 2) steps_.push_back({a_.me ^ mask, Kind::exchange});
      if (a_.me < extra) steps_.push_back({a_.me + power_, Kind::give_result});
    }
  }

  bool advance() override {
    while (step_ < steps_.size()) {
      const Step& step = steps_[step_];
      if (!posted_) post(step);
      if (receive_ && receive_->test()) receive_.reset();
      if (send_ && send_->test()) send_.reset();
      if (receive_ || send_) return false;
      if (step.kind == Kind::exchange || step.kind == Kind::take_over) combine(step.peer);
      posted_ = false;
      ++step_;
    }
    return true;
  }
  int waiting_for() const override {
    return step_ < steps_.size() ? a_.peers[static_cast<size_t>(steps_[step_].peer)] : -1;
  }
  const char* name() const override { return "recursive doubling"; }

 private:
  enum class Kind { hand_over, take_over, exchange, give_result, get_result };
  struct Step {
    int peer;  // index
    Kind kind;
  };

  // The lower rank's value comes first on both sides: then even zeros of either sign and NaNs are the same bits.
  void combine(int peer) {
    if (a_.me < peer) {
      accumulate(a_.dtype, a_.op, a_.data, received_.data(), a_.count);
    } else {
      accumulate(a_.dtype, a_.op, received_.data(), a_.data, a_.count);
      std::memcpy(a_.data, received_.data(), nbytes_);
    }
  }

  void post(const Step& step) {
    const int peer = a_.peers[static_cast<size_t>(step.peer)];
    if (step.kind == Kind::exchange || step.kind == Kind::take_over)
      receive_ = a_.channel.receive(received_.data(), nbytes_, peer, a_.tag);
    if (step.kind == Kind::get_result) receive_ = a_.channel.receive(a_.data, nbytes_, peer, a_.tag);
    if (step.kind != Kind::take_over && step.kind != Kind::get_result)
      send_ = a_.channel.send(a_.data, nbytes_, peer, a_.tag);
    posted_ = true;
  }

  AllreduceArgs a_;
  size_t nbytes_;
  std::vector<std::byte> received_;
  int power_ = 1;
  std::vector<Step> steps_;
  size_t step_ = 0;
  bool posted_ = false;
  RequestPtr receive_, send_;
};

}  // namespace

std::unique_ptr<Allreduce> recursive_doubling(const AllreduceArgs& args) {
  return std::make_unique<RecursiveDoubling>(args);
}

}  // namespace keras_hpc
