// SPDX-License-Identifier: Apache-2.0
#include <cstddef>

#include "algorithms/allreduce.hpp"

namespace keras_hpc {
namespace {

// The buffer is cut into p chunks. In step s of the first p - 1 (reduce-scatter), rank r sends chunk r - s to its right
// neighbour and adds what comes from the left to chunk r - s - 1. Then chunk r + 1 is complete at rank r, and in the
// next p - 1 steps (allgather) the complete chunks go once around.
class Ring final : public Allreduce {
 public:
  explicit Ring(const AllreduceArgs& args)
      : a_(args), p_(static_cast<int>(args.peers.size())), received_((args.count / p() + 1) * size_of(args.dtype)) {}

  bool advance() override {
    while (step_ < 2 * (p_ - 1)) {
      if (!posted_) post();
      if (receive_ && receive_->test()) receive_.reset();
      if (send_ && send_->test()) send_.reset();
      if (receive_ || send_) return false;
      if (is_reducing()) {
        const int chunk = receiving();
        accumulate(a_.dtype, a_.op, at(chunk), received_.data(), elements(chunk));
      }
      posted_ = false;
      ++step_;
    }
    return true;
  }
  int waiting_for() const override { return a_.peers[static_cast<size_t>(modulo(a_.me - 1))]; }
  const char* name() const override { return "ring"; }

 private:
  size_t p() const { return static_cast<size_t>(p_); }
  int modulo(int i) const { return (i % p_ + p_) % p_; }
  size_t first(int chunk) const { return a_.count * static_cast<size_t>(chunk) / p(); }
  size_t elements(int chunk) const { return first(chunk + 1) - first(chunk); }
  size_t nbytes(int chunk) const { return elements(chunk) * size_of(a_.dtype); }
  void* at(int chunk) const { return static_cast<std::byte*>(a_.data) + first(chunk) * size_of(a_.dtype); }

  bool is_reducing() const { return step_ < p_ - 1; }
  // In the second half chunk r + 1 is sent first, in step p - 1: the same formula, one turn later.
  int sending() const { return modulo(a_.me - step_); }
  int receiving() const { return modulo(a_.me - step_ - 1); }

  void post() {
    const int left = a_.peers[static_cast<size_t>(modulo(a_.me - 1))];
    const int right = a_.peers[static_cast<size_t>(modulo(a_.me + 1))];
    void* to = is_reducing() ? received_.data() : at(receiving());
    receive_ = a_.channel.receive(to, nbytes(receiving()), left, a_.tag);
    send_ = a_.channel.send(at(sending()), nbytes(sending()), right, a_.tag);
    posted_ = true;
  }

  AllreduceArgs a_;
  int p_;
  std::vector<std::byte> received_;
  int step_ = 0;
  bool posted_ = false;
  RequestPtr receive_, send_;
};

}  // namespace

std::unique_ptr<Allreduce> ring(const AllreduceArgs& args) {
  return std::make_unique<Ring>(args);
}

}  // namespace keras_hpc
