// SPDX-License-Identifier: Apache-2.0
// Carries out a schedule.
#include <algorithm>
#include <utility>

#include "algorithms/allreduce.hpp"
#include "algorithms/schedule.hpp"
#include "algorithms/wire.hpp"

namespace keras_hpc {
namespace {

class Exchange final : public Allreduce {
 public:
  Exchange(const AllreduceArgs& args, Schedule schedule)
      : a_(args), wire_(args.dtype, args.wire), schedule_(std::move(schedule)) {}

  bool advance() override {
    for (; step_ < schedule_.size(); ++step_) {
      if (!posted_) post(schedule_[step_]);
      while (!pending_.empty() && pending_.back().second->test()) pending_.pop_back();
      if (!pending_.empty()) return false;
      take(schedule_[step_]);
      posted_ = false;
    }
    return true;
  }
  int waiting_for() const override {
    return pending_.empty() ? a_.peers[static_cast<size_t>(a_.me)] : pending_.back().first;
  }

 private:
  std::byte* at(size_t element) const { return static_cast<std::byte*>(a_.data) + element * size_of(a_.dtype); }
  static size_t elements(const Move& move) { return move.end - move.begin; }
  // Received into memory of its own, and not where it belongs.
  bool buffered(const Step& step) const { return step.adds || wire_.rounds(); }

  void post(const Step& step) {
    wire_.round(at(step.round_begin), step.round_end - step.round_begin);
    size_t in = 0;
    size_t out = 0;
    if (buffered(step))
      for (const Move& move : step.receives) in += wire_.nbytes(elements(move));
    if (wire_.rounds())
      for (const Move& move : step.sends) out += wire_.nbytes(elements(move));
    if (received_.size() < in) received_.resize(in);
    if (sent_.size() < out) sent_.resize(out);

    // Receives are tested last: they take longest, and then the sends have gone, too.
    std::byte* place = received_.data();
    for (const Move& move : step.receives) {
      const size_t nbytes = wire_.nbytes(elements(move));
      const int peer = a_.peers[static_cast<size_t>(move.peer)];
      pending_.emplace_back(peer, a_.channel.receive(buffered(step) ? place : at(move.begin), nbytes, peer, a_.tag));
      place += nbytes;
    }
    place = sent_.data();
    for (const Move& move : step.sends) {
      const size_t nbytes = wire_.nbytes(elements(move));
      const int peer = a_.peers[static_cast<size_t>(move.peer)];
      const void* data = at(move.begin);
      if (wire_.rounds()) {
        wire_.encode(data, place, elements(move));
        data = place;
        place += nbytes;
      }
      pending_.emplace_back(peer, a_.channel.send(data, nbytes, peer, a_.tag));
    }
    posted_ = true;
  }

  // Everything has arrived.
  void take(const Step& step) {
    if (!buffered(step) || step.receives.empty()) return;
    std::vector<std::pair<int, const std::byte*>> parts;
    const std::byte* place = received_.data();
    for (const Move& move : step.receives) {
      if (!step.adds) wire_.decode(place, at(move.begin), elements(move));
      parts.emplace_back(move.peer, place);
      place += wire_.nbytes(elements(move));
    }
    if (!step.adds) return;
    std::sort(parts.begin(), parts.end());
    std::vector<const void*> sources;
    size_t mine = 0;
    for (const auto& [peer, part] : parts) {
      mine += peer < a_.me;
      sources.push_back(part);
    }
    const Move& move = step.receives.front();
    wire_.combine(a_.op, at(move.begin), sources, mine, elements(move));
  }

  AllreduceArgs a_;
  Wire wire_;
  Schedule schedule_;
  size_t step_ = 0;
  bool posted_ = false;
  std::vector<std::pair<int, RequestPtr>> pending_;
  std::vector<std::byte> received_;
  std::vector<std::byte> sent_;
};

}  // namespace

std::unique_ptr<Allreduce> make_allreduce(Algorithm algorithm, const AllreduceArgs& args) {
  constexpr Schedule (*schedules[])(int, int, size_t) = {recursive_doubling, rabenseifner, ring, pairwise};
  const auto p = static_cast<int>(args.peers.size());
  return std::make_unique<Exchange>(args, schedules[static_cast<size_t>(algorithm)](p, args.me, args.count));
}

}  // namespace keras_hpc
