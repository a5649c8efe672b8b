// SPDX-License-Identifier: Apache-2.0
#include "engine/failure.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "common/index.hpp"

namespace keras_hpc {
thread_local void (*check_interrupt)() = nullptr;

// ---- this rank

std::exception_ptr Failure::explained(std::exception_ptr error) const {
  constexpr std::chrono::milliseconds nap(5);
  constexpr double seconds = 1.5;  // MPI may know before the kernel tells, and other nodes tell a second later
  try {
    std::rethrow_exception(error);
  } catch (const NetworkError& e) {
    const std::string who = "Rank " + std::to_string(topology_.rank) + " cannot go on: ", what = e.what();
    for (const auto begin = Clock::now(); !is_set() && seconds_since(begin) < seconds;
         std::this_thread::sleep_for(nap)) {
      for (const int rank : topology_.local_ranks())
        if (rank != topology_.rank && has_died(rank))
          return std::make_exception_ptr(
              Error(who + "the process of rank " + std::to_string(rank) + " has ended. " + what, rank));
      const auto item = news_ ? news_->hear() : std::nullopt;
      if (item) return std::make_exception_ptr(Error(who + item->text(topology_.rank) + " " + what, item->culprit));
    }
  } catch (...) {  // it says what it is
  }
  return error;
}

void Failure::set(std::exception_ptr error) {
  int culprit = -1;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    culprit = e.culprit;
  } catch (...) {  // not of the engine
  }
  {
    const std::lock_guard lock(mutex_);
    if (is_set()) return;
    error_ = std::move(error);
    // First the node, then this rank's other threads: one of them may leave, or use its memory again, as soon as it
    // sees the error.
    write(Fate::failed, culprit < 0 ? topology_.rank : culprit);
    set_.store(true, std::memory_order_release);
  }
  ring();
  tell(topology_.rank, culprit);
}

// Other nodes.
void Failure::tell(int messenger, int culprit) const {
  if (!news_) return;
  const bool is_own = culprit < 0 || culprit == topology_.rank;
  const News::Why why = !is_own && has_died(culprit) ? News::Why::ended : News::Why::failed;
  news_->tell({messenger, is_own ? topology_.rank : culprit, why});
}

void Failure::leave() {
  {
    const std::lock_guard lock(mutex_);
    write(Fate::left, topology_.rank);
  }
  ring();
  if (news_) news_->leave();
}

void Failure::close() {
  {
    const std::lock_guard lock(mutex_);
    if (!is_set())
      error_ =
          std::make_exception_ptr(Error("This team is closed: keras_hpc.finalize() was called, or the team was "
                                        "closed or freed, while another thread still used it."));
    write(Fate::left, topology_.rank);  // first the node, as above
    set_.store(true, std::memory_order_release);
  }
  leave();
}

void Failure::write(Fate fate, int culprit) {
  Bell& mine = bells_[topology_.local_rank];
  Fate present = Fate::present;
  if (mine.fate.load(std::memory_order_relaxed) == present) mine.culprit.store(culprit, std::memory_order_relaxed);
  // Whoever has failed stays so when it leaves: that says more.
  mine.fate.compare_exchange_strong(present, fate, std::memory_order_seq_cst);
  // The error is known to the node before this rank's caller uses its memory again.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Failure::ring() {
  for (int i = 0; i < kinds_ * topology_.local_size(); ++i) bells_[i].ring();
}

void Failure::rethrow() const {
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(error_);
}

// ---- the others

bool Failure::all_present() const {
  for (int r = 0; r < topology_.local_size(); ++r)
    if (bells_[r].fate.load(std::memory_order_relaxed) != Fate::present) return false;
  return true;
}

const Bell* Failure::bell_of(int rank) const {
  const auto& local = topology_.local_ranks();
  const auto found = std::find(local.begin(), local.end(), rank);
  return found == local.end() ? nullptr : bells_ + (found - local.begin());
}

bool Failure::has_died(int rank) const {
  const Bell* bell = bell_of(rank);
  return bell != nullptr && bell->fate == Fate::present && has_ended(bell->process);
}

// A rank has failed: whose fault it is, in words.
std::string Failure::blame(int rank, int& culprit) const {
  int messenger = rank;
  const auto failed = [this](int r) {
    const Bell* bell = bell_of(r);
    return bell != nullptr && bell->fate.load(std::memory_order_acquire) == Fate::failed;
  };
  // Who has given up because of another rank says which. At most as many steps as there are ranks: two may blame each
  // other.
  for (int steps = 0; steps < topology_.local_size() && failed(rank); ++steps) {
    const int next = bell_of(rank)->culprit.load(std::memory_order_relaxed);
    if (next == rank) break;
    messenger = rank;
    if (next == topology_.rank) {
      culprit = rank;
      return "rank " + std::to_string(rank) + " has given up waiting for this rank.";
    }
    rank = next;
  }
  culprit = rank;
  const std::string name = "rank " + std::to_string(rank);
  if (failed(rank)) return name + " met an error, which it tells of itself.";
  const Bell* bell = bell_of(rank);
  if (has_died(rank)) return "the process of " + name + " has ended.";
  if (bell != nullptr && bell->fate == Fate::left) return name + " has already left the job.";
  return "rank " + std::to_string(messenger) + " has given up waiting for " + name + ".";
}

std::vector<int> Failure::not_in_mpi(uint64_t call) const {
  std::vector<int> found;
  for (const int rank : topology_.local_ranks())
    if (bell_of(rank)->begun.load(std::memory_order_seq_cst) < call) found.push_back(rank);
  return found;
}

std::vector<int> Failure::still_in_mpi(uint64_t call) const {
  std::vector<int> found;
  for (const int rank : topology_.local_ranks()) {
    const Bell* bell = bell_of(rank);
    if (rank != topology_.rank && bell->begun >= call && bell->over < call) found.push_back(rank);
  }
  return found;
}

uint64_t Failure::call_of_mpi(int rank) const {
  const Bell* bell = bell_of(rank);
  if (bell == nullptr) return 0;
  const uint64_t begun = bell->begun;
  return bell->over < begun ? begun : 0;
}

std::vector<int> Failure::outside_mpi(const std::vector<int>& ranks) const {
  std::vector<int> found;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(found),
               [this](int rank) { return call_of_mpi(rank) == 0; });
  return found;
}

void Failure::throw_if_neighbour_failed() const {
  // What was read before comes before the looks at the bells.
  std::atomic_thread_fence(std::memory_order_acquire);
  for (int r = 0; r < topology_.local_size(); ++r) {
    if (r == topology_.local_rank || bells_[r].fate.load(std::memory_order_acquire) == Fate::present) continue;
    int culprit = -1;
    const std::string text = blame(topology_.local_ranks()[at(r)], culprit);
    throw Error("Rank " + std::to_string(topology_.rank) + " cannot go on: " + text, culprit);
  }
}

// Why another rank keeps this one from going on, if one does: a neighbour that has failed, or what other nodes say. It
// is passed on at once, whether or not this rank goes on for a while.
std::string Failure::complaint(int& culprit, bool of_this_rank_only) const {
  const auto item = news_ ? news_->hear() : std::nullopt;
  // First what concerns this rank.
  for (const bool of_this_rank : {true, false}) {
    if (of_this_rank_only && !of_this_rank) break;
    for (const int rank : topology_.local_ranks()) {
      if (rank == topology_.rank || bell_of(rank)->fate.load(std::memory_order_acquire) != Fate::failed) continue;
      const int its_culprit = bell_of(rank)->culprit.load(std::memory_order_relaxed);
      if (of_this_rank && its_culprit != topology_.rank) continue;
      tell(rank, its_culprit);
      return blame(rank, culprit);
    }
    if (!item || (of_this_rank && item->culprit != topology_.rank)) continue;
    culprit = item->culprit;
    news_->tell(*item);
    return item->text(topology_.rank);
  }
  return "";
}

void Lookout::look_around(bool beats) {
  if (failure_->news_ == nullptr || seconds_since(looked_at_) < slice_seconds) return;
  looked_at_ = Clock::now();
  if (beats) failure_->beat();
  const Topology& topology = failure_->topology_;
  int culprit = topology.local_ranks()[at((topology.local_rank + 1) % topology.local_size())];  // it may be this one
  const bool has_died = failure_->has_died(culprit);
  if (has_died) failure_->tell(topology.rank, culprit);
  const std::string text =
      has_died ? "the process of rank " + std::to_string(culprit) + " has ended." : failure_->complaint(culprit);
  if (text.empty()) return;
  // A program may end so that has done all its work. What others say is believed at the next look: each node that it
  // has to pass would else take that long.
  const double grace = has_died ? failure_->grace_seconds_ : slice_seconds / 2;
  absent_since_ = std::min(absent_since_, looked_at_);
  if (seconds_since(absent_since_) > grace)
    throw Error("Rank " + std::to_string(topology.rank) + " cannot go on: " + text, culprit);
}

void Lookout::listen_to_beats() {
  for (int r = 0; r < failure_->topology_.local_size(); ++r) {
    const uint32_t count = failure_->bells_[r].beats.load(std::memory_order_relaxed);
    if (beats_.size() <= at(r))
      beats_.push_back({count, begin_});
    else if (beats_[at(r)].count != count)
      beats_[at(r)] = {count, Clock::now()};
  }
}

int Lookout::silent(const std::vector<int>& ranks) const {
  constexpr double silence = 2;  // more than twice as long as between two beats
  const auto& local = failure_->topology_.local_ranks();
  for (const int rank : ranks) {
    const auto place = static_cast<size_t>(std::find(local.begin(), local.end(), rank) - local.begin());
    if (rank != failure_->topology_.rank && seconds_since(beats_[place].since) > silence) return rank;
  }
  return -1;
}

int Lookout::idle_suspect(const Awaited& awaited) {
  listen_to_beats();
  int found = silent(awaited.suspects());
  const std::vector<int> missing = awaited.missing();
  if (!failure_->outside_mpi(missing).empty()) return found;
  for (const int rank : missing) {
    if (found >= 0) break;
    const uint64_t call = failure_->call_of_mpi(rank);
    const std::vector<int> late = failure_->not_in_mpi(call);
    found = late.empty() ? silent(failure_->still_in_mpi(call)) : late[0];
  }
  return found;
}

void Lookout::look_at_blame(const Awaited& awaited) const {
  int culprit = -1;
  const std::string text = failure_->complaint(culprit, true);
  if (!text.empty()) throw Error(awaited.name() + ": " + text, culprit);
}

double Lookout::hearing_seconds(const Awaited& awaited) const {
  const Topology& topology = failure_->topology_;
  if (topology.size == topology.node_count) return 0;  // nobody knows
  const std::vector<int> missing = awaited.missing();
  const auto is_known = [&](int rank) {
    return rank != topology.rank && failure_->bell_of(rank) != nullptr && failure_->call_of_mpi(rank) == 0;
  };
  if (std::any_of(missing.begin(), missing.end(), is_known)) return 0;  // this rank knows, too
  // Who hears of it tells its own node at its next look. Who knows nobody leaves it to those of its node that do, or
  // finds out meanwhile who is silent.
  double hops = missing.empty() || failure_->news_ == nullptr ? 3 : 2;
  for (int nodes = 1; nodes < topology.node_count; nodes *= 2) ++hops;
  return hops * slice_seconds;
}

void Lookout::examine(const Awaited& awaited, bool due) {
  if (due && check_interrupt != nullptr) check_interrupt();
  if (due) {
    failure_->beat();
    listen_to_beats();
  }
  const Topology& topology = failure_->topology_;
  const std::vector<int> missing = awaited.missing();
  const auto is_in = [](const std::vector<int>& ranks, int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  std::string text;
  int culprit = -1;
  for (const int rank : topology.local_ranks()) {
    if (rank == topology.rank) continue;
    const bool certain = is_in(missing, rank);
    const bool has_left = failure_->bell_of(rank)->fate == Fate::left;
    if (has_left && (certain || awaited.needs(rank)))
      text = "rank " + std::to_string(rank) +
             " has already left the job (it called finalize or reached the end of its script) while this rank waits "
             "for it. Do all ranks run the same number of steps, and make the same calls?";
    else if (due && failure_->has_died(rank))  // also where another one is missing: that one may wait for this one
      text = "the process of rank " + std::to_string(rank) + " has ended, and this rank waits for it.";
    else
      continue;
    culprit = rank;
    // It may have done its part just before.
    if (certain && is_in(awaited.missing(), rank)) throw Error(awaited.name() + ": " + text, culprit);
  }
  if (!text.empty()) {
    absent_since_ = std::min(absent_since_, Clock::now());
    if (seconds_since(absent_since_) > failure_->grace_seconds_) throw Error(awaited.name() + ": " + text, culprit);
  }
  text = failure_->complaint(culprit);
  if (!text.empty() && seconds_since(begin_) > failure_->grace_seconds_)
    throw Error(awaited.name() + ": " + text, culprit);
}

}  // namespace keras_hpc
