// SPDX-License-Identifier: Apache-2.0
// Local steps (local SGD): each rank applies its own gradients, and after a period of steps the weights become their
// mean over ranks, weighted by the samples that each has seen since the last time.
//
// The plan's tensors are the weights, and behind them, if asked for, what an optimizer keeps for each of them. A step
// begins with begin(), which counts it and says what it has to do, the same on every rank, because ranks begin equally
// many steps. Where it says `exchange`, the step starts every tensor of the plan after its update and waits for all of
// them, as for a plan without a schedule: what comes back is
//   without overlap   the mean, or, with an outer optimizer, the weights after its step
//   with overlap      at the period's end the tensors themselves, whose mean is on its way in memory of the engine; so
//                     many steps later the tensors plus (what the mean gives - what was sent), so that nothing of what
//                     happened meanwhile is lost
// finish() brings all tensors to the mean outside of a step.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "engine/outer_step.hpp"
#include "engine/plan.hpp"

namespace keras_hpc {

class Team;

struct LocalOptions {
  uint64_t every = 0;    // steps of a period; 0: only finish() ends one
  uint64_t overlap = 0;  // steps that run while a mean is on its way, fewer than `every`; 0: it is waited for
  int weights = 0;       // the first so many tensors are weights: they take the outer step
  bool outer = false;
  double rate = 1, momentum = 0;  // of the outer optimizer
};

class LocalSteps {
 public:
  // What a step has to do.
  enum Mode : int {
    synchronous = 1,  // average gradients, as if there were no local steps
    anchor = 2,       // before the update: set_anchor of every weight
    exchange = 4,     // after the update: start and wait of every tensor
    last = 8          // synchronous steps follow
  };

  LocalSteps(Team& team, Plan& plan, const LocalOptions& options);

  // The next `synchronous` steps are synchronous, the `local` after them local, and the rest synchronous again. The
  // last local step ends a period.
  void set_schedule(uint64_t synchronous, uint64_t local);
  // A step begins, with so many samples of this rank.
  int begin(double samples);
  void set_anchor(int tensor, const void* weights);
  // Whether tensors differ from the mean; then the next start and wait of all tensors bring them there.
  bool finish();

  // Where a step, or finish(), has asked for it. Tensors must stay where they are from start to wait.
  void start(int tensor, void* data);
  void wait(int tensor);
  using Done = void (*)(void* arg, const char* error);
  bool wait_all_async(Done done, void* arg);

  uint64_t taken() const { return taken_; }  // local steps
  bool is_of(const Plan& plan) const { return &plan_ == &plan; }

  // What a checkpoint holds beside the tensors, between steps.
  struct State {
    uint64_t since = 0;       // local steps of the running period
    double samples = 0;       // of this rank in it
    bool anchored = false;    // memory("anchor") and "velocity" count
    bool travelling = false;  // "mean" and "sent" count
  };
  State state();  // waits for a mean that is on its way
  void restore(const State& state);
  enum class Kind { anchor, velocity, mean, sent };
  std::vector<std::byte>& memory(Kind kind, int tensor);

 private:
  struct Continuation;
  enum class Exchange : char { none, wait, launch };

  int count() const { return plan_.layout().tensor_count(); }
  size_t nbytes(int tensor) const { return plan_.layout().range(tensor).size(); }
  double weight() const;
  bool starts_early() const { return exchange_ == Exchange::wait && !lands_; }
  void check_started();
  // The stages of an exchange. `next` begins one that has to wait for the plan; false: all is done.
  bool next();
  void arrived();
  void advance(Done done, void* arg);
  void land();
  void launch();
  void end();

  Team& team_;
  Plan& plan_;
  const LocalOptions options_;
  std::mutex mutex_;
  std::vector<OuterStep> outer_;                     // [weight], or empty
  std::vector<std::vector<std::byte>> mean_, sent_;  // [tensor], with overlap
  std::vector<void*> data_;
  int started_ = 0, waited_ = 0;
  uint64_t step_ = 0, first_ = 0, end_ = 0;  // the local steps
  uint64_t taken_ = 0;
  uint64_t since_ = 0;
  double samples_ = 0;
  int anchored_ = 0;         // weights whose anchor is that of the running period
  bool travelling_ = false;  // a mean is on its way
  bool landed_ = false;      // it is in mean_
  // Of the running exchange.
  bool lands_ = false;
  bool waits_ = false;  // for the plan
  Exchange exchange_ = Exchange::none;
};

}  // namespace keras_hpc
