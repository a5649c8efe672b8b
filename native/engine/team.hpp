// SPDX-License-Identifier: Apache-2.0
// A team: ranks that reduce together, with communicators, communication threads and memory of its own. Teams share no
// lock, so several models reduce their gradients at the same time.
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/error.hpp"
#include "common/turns.hpp"
#include "engine/allreduce_call.hpp"
#include "engine/attendant.hpp"
#include "engine/exchanges.hpp"
#include "engine/failure.hpp"
#include "engine/local_steps.hpp"
#include "engine/pipeline.hpp"
#include "engine/plan.hpp"
#include "transport/pending.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

struct TeamOptions {
  int threads = 1;  // communication threads; 0: start and wait do the work
  double timeout_seconds = 300;
  double stall_seconds = 30;         // a warning when a wait takes longer
  std::optional<Patience> patience;  // none: what fits the ranks and cores of the node
  double grace_seconds = 2;          // see Failure
};

struct TeamReport {
  uint64_t steps = 0;           // executions of plans
  uint64_t bytes = 0;           // of tensors reduced by them
  uint64_t plan_bytes = 0;      // of the tensors of all plans together
  uint64_t segment_bytes = 0;   // memory of this rank's share in the segments
  double wire_seconds = 0;      // from the start of an execution's first tensor until its last is reduced
  double exposed_seconds = 0;   // that callers spent in wait
  double progress_seconds = 0;  // spent in reducing and on the network
  std::string algorithm;        // how
};

// "0, 2, 5"
std::string joined(const std::vector<int>& ranks);

class Team {
 public:
  // Collective.
  Team(std::unique_ptr<Transport> transport, int number, const TeamOptions& options);
  // By the last who holds it. close() lets all others know.
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Ends all that threads of this rank wait for here, with an error, and whatever they ask for later. When it returns
  // no thread of the engine works for the team.
  void close();
  // In a forked child nobody may use it, or destroy it.
  bool is_of_this_process() const { return fork_depth_ == fork_depth(); }

  const Topology& topology() const { return transport_->topology(); }
  int number() const { return context_.number; }
  int threads() const { return options_.threads; }
  // Of waits that begin from now on. Not while others wait.
  void set_time_limit(double seconds);
  double time_limit() const { return options_.timeout_seconds; }

  // Collective; throws PlanMismatch on every rank if the lists differ. The plan lives until end_plan, or as long as the
  // team.
  std::shared_ptr<Plan> make_plan(const std::string& name, const std::vector<TensorSpec>& tensors,
                                  const PlanOptions& options);
  // For a plan whose tensors live in its segment.
  std::shared_ptr<Pipeline> make_pipeline(Plan& plan);
  // For a plan of weights, a weighted mean.
  std::shared_ptr<LocalSteps> make_local_steps(Plan& plan, const LocalOptions& options);
  // Ends with the plan or the team, or by end_attendants: of a plan, or, with null, of all.
  void attach(std::shared_ptr<Attendant> attendant);
  void end_attendants(const Plan* plan);
  // Of steps that attendants may not make beside each other: in the order in which this rank has begun them.
  Turns& turns() { return turns_; }
  // Frees a plan that no rank will start again, and what works for it. Every rank does so, between executions.
  void end_plan(Plan& plan);
  void start(Plan& plan, int tensor, void* data, double weight);
  void wait(Plan& plan, int tensor);
  // Calls `done` exactly once, whatever happens. False, and never, if the team has no thread that could call it.
  bool wait_all_async(Plan& plan, void (*done)(void*, const char*), void* arg);

  // Collective: agrees on an exchange and on what `terms` say, which is all that ranks must have in common. Its number.
  int make_exchange(const ExchangeSpec& spec, const std::string& terms);
  const ExchangeSpec& exchange(int number) const;
  // See Exchanges.
  void start_exchange(int number, const ExchangeShape& shape, const void* data);
  void wait_exchange(int number, bool adjoint, void* result);

  // Collective, and block. Every rank calls them in the same order, one thread at a time.
  // `what` names who calls, and `shape` is of the data: both are compared between ranks, if given.
  void allreduce(void* data, int64_t count, DType dtype, Op op, std::optional<DType> wire = std::nullopt,
                 std::optional<Path> path = std::nullopt, const std::string& what = "",
                 const std::vector<int64_t>& shape = {});
  AllreduceCall& allreduce_call() { return *allreduce_; }
  // Collective: memory that the ranks of the node can reach directly. It lives as long as the pointer.
  std::shared_ptr<Area> make_area(size_t nbytes);
  bool takes_device_memory() const { return transport_->takes_device_memory(); }  // in messages
  // Collective.
  std::unique_ptr<Channel> open_channel() { return transport_->open_channel(); }
  void broadcast(void* data, size_t nbytes, int root);
  void allgather(const void* in, void* out, const std::vector<size_t>& nbytes_by_rank);
  // Sends `to[r]` bytes to rank r, one rank's after the other's, and receives `from[r]` bytes from it.
  void alltoall(const void* in, const std::vector<size_t>& to, void* out, const std::vector<size_t>& from);
  std::vector<int64_t> allgather_count(int64_t mine);
  void barrier();
  // Throws PlanMismatch on every rank unless all are in this call, with equal `what` and equal lists: naming the first
  // item that differs and the ranks, or, where they are in different calls, what each one wants.
  void agree(const std::string& what, const std::vector<std::string>& items);

  // What this rank is doing; may be asked for at any time.
  Activity& activity() { return activity_; }
  // Every plan, and how far this rank is with it.
  std::vector<PlanProgress> progress_of_plans() const;

  // An error of this rank outside of the engine, of which the others must learn. From then on no thread of the engine
  // reads or writes memory of this rank's callers: so they may be told.
  void fail(std::exception_ptr error);
  // For who may have given the engine memory before: when it throws, no thread of the engine works on it any more.
  void throw_if_failed() const;
  Lookout lookout() const { return Lookout(*failure_); }  // for who waits for other ranks outside of the engine
  // For a thread of the program's that does so about once a second: a team without threads else hears what other nodes
  // tell, and passes it on, only where this rank waits in it. An error is told to whoever uses the team next.
  void look_around();
  // This rank has no more work for the team: ranks of this node that still wait for it get an error at once.
  void leave();

  TeamReport report() const;

 private:
  // A communication channel and the thread, if any, that serves it.
  struct Lane {
    std::unique_ptr<Channel> channel;
    std::mutex mutex;  // held by whoever makes progress on this lane
    // An error has left something half done, such as a message that MPI now says has come. The error becomes the team's
    // a second later, perhaps (Failure::explained): until then nobody goes on here. For who holds the lane.
    bool is_broken = false;
    std::atomic<bool> wanted{false};  // somebody else has asked for progress meanwhile
    std::thread thread;
    ActivePlans plans;
    std::atomic<bool> is_under_way{false};     // a bucket of them is started here, and not back yet
    std::atomic<bool> network_is_busy{false};  // something of them is on its way between nodes
  };
  struct AsyncWait {
    Plan* plan;
    int tensor;  // the first that is not known to be complete
    void (*done)(void*, const char*);
    void* arg;
    Clock::time_point begin;
    Lookout lookout;
    WaitedTime time = {};
    std::shared_ptr<Activity::Note> stall = nullptr;  // once it takes long
  };
  class TensorWait;
  class CollectiveWait;

  void await(Plan& plan, int tensor);  // until it is complete
  bool progress(int lane);
  bool progress_all();
  bool is_under_way() const;
  void serve(int lane);
  bool complete_async();
  void look_after_async();
  // Does it, and makes an error the team's.
  template <class F>
  auto guarded(F&& f) -> decltype(f()) {
    try {
      return f();
    } catch (const std::exception&) {
      fail_and_throw();
    }
  }
  [[noreturn]] void fail_and_throw();  // the exception that is being handled
  void await_lanes() const;
  void withdraw(const char* why);
  void join_threads();
  template <class F>
  auto sharing(F&& f) -> decltype(f());
  template <class F>
  void in_turn(F&& collective);
  template <class F>
  void in_mpi(F&& f);
  void wait_for_memory(const std::function<bool()>& ready);
  void wait_for_collective(const std::function<bool()>& ready, const char* what, uint64_t number);
  void meet(const std::string& text, const std::string& label);
  [[noreturn]] void explain(const std::string& text, const PlanMismatch& disagreement);
  Timeout late(const Plan& plan, int tensor, int idle) const;
  int peer_awaited(const Plan& plan) const;

  std::unique_ptr<Transport> transport_;
  TeamOptions options_;
  std::unique_ptr<Channel> control_;  // for the blocking collectives
  std::mutex control_mutex_;
  std::unique_ptr<Segment> bells_;
  std::optional<Failure> failure_;
  std::mutex looking_mutex_;
  std::optional<Lookout> idle_lookout_;  // of look_around
  Activity activity_;
  TeamContext context_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  mutable std::mutex plans_mutex_;
  std::vector<std::shared_ptr<Plan>> plans_;
  int next_plan_ = 0;       // a number is never given again
  PlanTotals ended_plans_;  // what plans that are gone have done
  std::vector<std::shared_ptr<Pipeline>> pipelines_;
  std::vector<std::shared_ptr<LocalSteps>> local_steps_;
  Turns turns_;
  std::vector<std::shared_ptr<Attendant>> attendants_;
  std::unique_ptr<AllreduceCall> allreduce_;
  std::unique_ptr<Exchanges> exchanges_;               // made with the first of them
  std::atomic<Exchanges*> exchanges_of_all_{nullptr};  // the same, for any thread
  std::mutex async_mutex_;
  std::vector<AsyncWait> async_;
  std::atomic<int> asynchronous_waits_{0};  // of async_
  std::atomic<bool> stopping_{false};
  std::mutex closing_mutex_;
  const int fork_depth_ = fork_depth();
  std::atomic<double> exposed_seconds_{0};
  std::atomic<double> progress_seconds_{0};
};

}  // namespace keras_hpc
