// SPDX-License-Identifier: Apache-2.0
// How a team ends before its time: the first error of this rank, and what became of the other ranks of the node.
//
// A rank that fails, leaves or closes the team writes so into its bell, where its neighbours see it: at once if they
// wait for that rank in particular. Other nodes are told by messages (news.hpp). An error is the team's: whatever is
// asked of the team later raises it again. It names the rank that failed first, and not the one that was first to lose
// its patience with it.
#pragma once
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "common/waiting.hpp"
#include "engine/activity.hpp"
#include "engine/news.hpp"
#include "transport/topology.hpp"

namespace keras_hpc {

class Failure {
 public:
  // `bells`: one for each rank of the node. A rank that fails often has a reason that this one is about to find, too,
  // and can tell better; and what a rank has sent before it left arrives a little later: both within `grace_seconds`.
  // Who sleeps on any of `kinds` times as many is woken: see TeamContext.
  Failure(const Topology& topology, Bell* bells, int kinds, double grace_seconds)
      : topology_(topology), bells_(bells), kinds_(kinds), grace_seconds_(grace_seconds) {}

  // Where there are other nodes, they are told on these, and heard. Collective.
  void listen(std::unique_ptr<Channel> channel, std::unique_ptr<Links> links) {
    news_ = std::make_unique<News>(std::move(channel), std::move(links), topology_);
  }
  void stop_listening() {
    if (news_) news_->stop();
  }

  // What to say of an error that comes from the network, perhaps because another rank has died: that, once it is seen.
  std::exception_ptr explained(std::exception_ptr error) const;
  // This rank has failed; the first error stays. Tells the node, and other nodes.
  void set(std::exception_ptr error);
  // This rank has no more work for the team. Tells the node.
  void leave();
  // The same, and whatever is asked of the team from now on is an error.
  void close();

  bool is_set() const { return set_.load(std::memory_order_acquire); }
  void throw_if_set() const {
    if (is_set()) rethrow();
  }
  // Throws if another rank of the node has failed, or has left: whoever still needs something of this one then has had
  // its team closed. What was read before from memory of other ranks' callers is to be trusted only if it does not:
  // they write there again once they have got an error.
  void throw_if_neighbour_failed() const;

  // This rank is in a call of MPI that makes ranks wait for each other. Returns its number, from 1.
  uint64_t enter_mpi() const { return mine().begun.fetch_add(1, std::memory_order_seq_cst) + 1; }
  void leave_mpi() const { mine().over.fetch_add(1, std::memory_order_seq_cst); }
  // Ranks of the node that have not come to such a call, and other ones of the node that have not left it.
  std::vector<int> not_in_mpi(uint64_t call) const;
  std::vector<int> still_in_mpi(uint64_t call) const;
  // Those of these ranks that MPI does not let wait for others, as far as this one sees.
  std::vector<int> outside_mpi(const std::vector<int>& ranks) const;

 private:
  friend class Lookout;
  [[noreturn]] void rethrow() const;
  void write(Fate fate, int culprit);
  void ring();
  bool all_present() const;
  const Bell* bell_of(int rank) const;  // null: on another node
  bool has_died(int rank) const;
  std::string blame(int rank, int& culprit) const;
  void tell(int messenger, int culprit) const;
  Bell& mine() const { return bells_[topology_.local_rank]; }
  void beat() const { mine().beats.fetch_add(1, std::memory_order_relaxed); }
  uint64_t call_of_mpi(int rank) const;  // that the rank is in; 0: in none, or on another node
  std::string complaint(int& culprit, bool of_this_rank_only = false) const;

  const Topology& topology_;
  Bell* bells_;  // [kind][local rank]; what became of a rank is in its first
  const int kinds_;
  const double grace_seconds_;
  std::atomic<bool> set_{false};
  mutable std::mutex mutex_;
  std::exception_ptr error_;
  std::unique_ptr<News> news_;  // null: there is only this node
};

// What a rank waits for.
class Awaited {
 public:
  virtual ~Awaited() = default;
  virtual std::string name() const = 0;
  // Ranks that have not done their part, for certain; none: it is not known who.
  virtual std::vector<int> missing() const = 0;
  // Whether a rank of the node has still something to do for it, for certain or as far as is known.
  virtual bool needs(int /* rank */) const { return missing().empty(); }
  // Where that is not known: ranks of the node that have not, but may be waiting themselves, for another node.
  virtual std::vector<int> suspects() const { return {}; }
  virtual bool is_outside() const { return false; }  // something of another node, which rings no bell
  virtual Stall stall() const = 0;
};

// What one wait looks out for, beside what it waits for: an error of its own team, ranks of the node that have failed,
// left or died, and Ctrl-C.
class Lookout {
 public:
  explicit Lookout(const Failure& failure) : failure_(&failure) {}

  // Throws if there is no use in waiting any longer.
  void look(const Awaited& awaited) {
    failure_->throw_if_set();
    const bool due = seconds_since(looked_at_) > slice_seconds;
    if (!due && failure_->all_present()) return;
    if (due) looked_at_ = Clock::now();
    examine(awaited, due);
  }
  // The same for a thread of a rank that may wait for nothing, so that its node hears what others tell, and a death
  // that nobody waits for is told to them. Looks once in a while, and only where there are other nodes.
  // `beats`: the thread is the engine's.
  void look_around(bool beats);
  // After the time limit: a suspect that does not wait, as it seems, or the rank for which MPI lets another one wait
  // that is missing; -1: none.
  int idle_suspect(const Awaited& awaited);
  // After the time limit: throws if others have given up waiting for this rank, as for one that was stopped for long.
  // Whom it waits for itself then says nothing.
  void look_at_blame(const Awaited& awaited) const;
  // How long to go on after the time limit, seconds: who is late on another node is known there, and told.
  double hearing_seconds(const Awaited& awaited) const;

 private:
  static constexpr double slice_seconds = 0.9;  // less than a thread sleeps, so that each sleep ends with a look
  void examine(const Awaited& awaited, bool due);
  void listen_to_beats();
  int silent(const std::vector<int>& ranks) const;  // one of them that gives no beats; -1: none

  const Failure* failure_;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point looked_at_ = begin_;
  Clock::time_point absent_since_ = Clock::time_point::max();  // a rank that may be the one that is awaited
  struct Beat {
    uint32_t count;
    Clock::time_point since;
  };
  std::vector<Beat> beats_;  // [local rank] the last that was seen; none: the wait is not long yet
};

// What a thread is to do about once a second while it waits, or null. It throws Interrupted to end the wait.
extern thread_local void (*check_interrupt)();

}  // namespace keras_hpc
