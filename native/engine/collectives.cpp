// SPDX-License-Identifier: Apache-2.0
// What ranks of a team tell each other beside gradients, through MPI. It works on memory of the engine, some MiB at a
// time: MPI goes on when this rank gives up, and the caller's memory is then the caller's again.
#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"
#include "transport/pending.hpp"

namespace keras_hpc {
namespace {

// On its way at once, of all ranks together.
constexpr size_t kRoundBytes = size_t{32} << 20;

size_t sum(const std::vector<size_t>& values) {
  size_t total = 0;
  for (const size_t value : values) total += value;
  return total;
}

// What of each of `totals` bytes lies in the round that begins at `begin`.
std::vector<size_t> in_round(const std::vector<size_t>& totals, size_t begin, size_t length) {
  std::vector<size_t> counts;
  for (const size_t total : totals) counts.push_back(std::min(total - std::min(total, begin), length));
  return counts;
}

// What ranks compare, beside how many elements of which dtype they reduce.
uint64_t tag_of(const std::string& what, const std::vector<int64_t>& shape) {
  uint64_t tag = what.empty() ? 0 : std::hash<std::string>{}(what);
  for (const int64_t length : shape) tag = (tag ^ static_cast<uint64_t>(length + 1)) * 0x100000001b3ULL;
  return tag;
}

// ", shape (2, 3)"
std::string text_of(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t length : shape) text += (text.empty() ? "" : ", ") + std::to_string(length);
  return text.empty() ? "" : ", shape (" + text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace

// In a call of MPI: `number` is that of failure.hpp.
class Team::CollectiveWait final : public Awaited {
 public:
  CollectiveWait(const Team& team, const char* what, uint64_t number) : team_(team), what_(what), number_(number) {}
  std::string name() const override {
    return std::string("Waited for the other ranks in ") + what_ + " (team " + std::to_string(team_.number()) +
           ", rank " + std::to_string(team_.topology().rank) + ")";
  }
  std::vector<int> missing() const override { return team_.failure_->not_in_mpi(number_); }
  bool needs(int rank) const override { return is_in(rank, missing()) || is_in(rank, suspects()); }
  std::vector<int> suspects() const override { return team_.failure_->still_in_mpi(number_); }
  bool is_outside() const override { return true; }
  Stall stall() const override {
    return {"collective", team_.activity_.collectives, what_, -1,
            [&failure = *team_.failure_, number = number_] { return failure.not_in_mpi(number); }};
  }

 private:
  static bool is_in(int rank, const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  }

  const Team& team_;
  const char* what_;
  const uint64_t number_;
};

void Team::wait_for_collective(const std::function<bool()>& ready, const char* what, uint64_t number) {
  const CollectiveWait wait(*this, what, number);
  int silent = -1;
  if (wait_watched(context_, context_.my_bell(), ready, wait, &silent)) return;
  const std::vector<int> missing = wait.missing();
  const int culprit = silent >= 0 || missing.empty() ? silent : missing[0];
  throw Timeout("Waited " + std::to_string(static_cast<int>(options_.timeout_seconds)) + " s for the other ranks in " +
                    what + ": not every rank arrived" +
                    (!missing.empty() ? ". Missing: rank " + joined(missing)
                     : silent >= 0    ? ". It seems that rank " + std::to_string(silent) + " was stopped"
                                      : "") +
                    ".",
                culprit);
}

// All waits of `f` are in one call of MPI, of which it gets the number. Who fails in it stays there.
template <class F>
void Team::in_mpi(F&& f) {
  f(failure_->enter_mpi());
  failure_->leave_mpi();
}

// One after the other. Each is known to the watchdog by its number.
template <class F>
void Team::in_turn(F&& collective) {
  const std::lock_guard lock(control_mutex_);
  throw_if_failed();
  ++activity_.collectives;
  guarded([&] { in_mpi(collective); });
}

void Team::wait_for_memory(const std::function<bool()>& ready) {
  guarded([&] { in_mpi([&](uint64_t call) { wait_for_collective(ready, "the making of shared memory", call); }); });
}

void Team::broadcast(void* data, size_t nbytes, int root) {
  if (root < 0 || root >= topology().size)
    throw Error("Expected a root from 0 to " + std::to_string(topology().size - 1) +
                ". Received: " + std::to_string(root));
  in_turn([&](uint64_t call) {
    auto* bytes = static_cast<std::byte*>(data);
    const auto message = message_memory(std::min(nbytes, kRoundBytes));
    for (size_t begin = 0; begin < nbytes; begin += kRoundBytes) {
      const size_t n = std::min(kRoundBytes, nbytes - begin);
      Pending pending(message);
      if (topology().rank == root) std::memcpy(message.get(), bytes + begin, n);
      pending.add(control_->broadcast(message.get(), n, root));
      wait_for_collective([&] { return pending.test(); }, "broadcast", call);
      if (topology().rank != root) std::memcpy(bytes + begin, message.get(), n);
    }
  });
}

void Team::allgather(const void* in, void* out, const std::vector<size_t>& nbytes_by_rank) {
  in_turn([&](uint64_t call) {
    const size_t me = at(topology().rank);
    const size_t length = std::max<size_t>(kRoundBytes / nbytes_by_rank.size(), 1);
    const size_t longest = *std::max_element(nbytes_by_rank.begin(), nbytes_by_rank.end());
    for (size_t begin = 0; begin < longest || begin == 0; begin += length) {
      const std::vector<size_t> counts = in_round(nbytes_by_rank, begin, length);
      const auto message = message_memory(counts[me] + sum(counts));  // this rank's, and all
      std::byte* all = message.get() + counts[me];
      if (counts[me] > 0) std::memcpy(message.get(), static_cast<const std::byte*>(in) + begin, counts[me]);
      Pending pending(message);
      pending.add(control_->allgather(message.get(), all, counts));
      wait_for_collective([&] { return pending.test(); }, "allgather", call);
      auto* place = static_cast<std::byte*>(out);
      for (size_t r = 0; r < counts.size(); ++r) {
        if (counts[r] > 0) std::memcpy(place + begin, all, counts[r]);
        all += counts[r];
        place += nbytes_by_rank[r];
      }
    }
  });
}

std::vector<int64_t> Team::allgather_count(int64_t mine) {
  std::vector<int64_t> counts(at(topology().size));
  allgather(&mine, counts.data(), std::vector<size_t>(counts.size(), sizeof mine));
  return counts;
}

void Team::alltoall(const void* in, const std::vector<size_t>& to, void* out, const std::vector<size_t>& from) {
  constexpr int tag = 1;
  in_turn([&](uint64_t call) {
    const size_t me = at(topology().rank);
    const size_t length = std::max<size_t>(kRoundBytes / to.size(), 1);
    size_t longest = 0;
    for (size_t r = 0; r < to.size(); ++r) longest = std::max({longest, to[r], from[r]});
    for (size_t begin = 0; begin < longest; begin += length) {
      const std::vector<size_t> out_counts = in_round(to, begin, length), in_counts = in_round(from, begin, length);
      const auto message = message_memory(sum(out_counts) + sum(in_counts));
      Pending pending(message);
      std::byte* sent = message.get();
      std::byte* received = sent + sum(out_counts);
      const auto* source = static_cast<const std::byte*>(in);
      for (size_t r = 0; r < to.size(); ++r) {
        if (out_counts[r] > 0) std::memcpy(sent, source + begin, out_counts[r]);
        const auto peer = static_cast<int>(r);
        if (r == me) {
          if (in_counts[r] > 0) std::memcpy(received, sent, in_counts[r]);
        } else {
          if (in_counts[r] > 0) pending.add(control_->receive(received, in_counts[r], peer, tag), peer);
          if (out_counts[r] > 0) pending.add(control_->send(sent, out_counts[r], peer, tag), peer);
        }
        sent += out_counts[r];
        received += in_counts[r];
        source += to[r];
      }
      wait_for_collective([&] { return pending.test(); }, "alltoall", call);
      received = message.get() + sum(out_counts);
      auto* target = static_cast<std::byte*>(out);
      for (size_t r = 0; r < from.size(); ++r) {
        if (in_counts[r] > 0) std::memcpy(target + begin, received, in_counts[r]);
        received += in_counts[r];
        target += from[r];
      }
    }
  });
}

void Team::barrier() {
  // Once it is there, ranks meet in shared memory, and see there what another one does instead.
  if (allreduce_) return topology().size == 1 ? void() : meet("\nbarrier", "barrier");
  in_turn([&](uint64_t call) {
    Pending pending;
    pending.add(control_->barrier());
    wait_for_collective([&] { return pending.test(); }, "barrier", call);
  });
}

void Team::allreduce(void* data, int64_t count, DType dtype, Op op, std::optional<DType> wire, std::optional<Path> path,
                     const std::string& what, const std::vector<int64_t>& shape) {
  if (topology().size == 1) return;
  const bool mean = op == Op::mean;
  if (mean && (dtype == DType::int32 || dtype == DType::int64))
    throw Error("The mean of integers is not an integer. Expected op sum, min or max.");
  throw_if_failed();
  try {
    ++activity_.calls;
    allreduce_->run(data, static_cast<size_t>(count), dtype, op, wire, path, tag_of(what, shape));
  } catch (const Disagreement& e) {  // on all ranks, before any data moved: the team can go on
    explain("\n" + (what.empty() ? "allreduce" : what) + ": " + e.mine + text_of(shape), e);
  } catch (const std::exception&) {
    fail_and_throw();
  }
}

}  // namespace keras_hpc
