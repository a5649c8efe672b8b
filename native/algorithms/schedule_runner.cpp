// SPDX-License-Identifier: Apache-2.0
// Carries out a schedule.
#include <algorithm>
#include <utility>

#include "algorithms/allreduce.hpp"
#include "algorithms/schedule.hpp"
#include "algorithms/wire.hpp"
#include "transport/pending.hpp"

namespace keras_hpc {
namespace {

class ScheduleRunner final : public Allreduce {
 public:
  ScheduleRunner(const AllreduceArgs& args, Schedule schedule)
      : a_(args),
        wire_(args.dtype, args.wire),
        schedule_(std::move(schedule)),
        messages_(std::make_shared<Messages>(Messages{args.memory, {}, {}})),
        pending_(messages_) {}

  bool advance() override {
    for (; step_ < schedule_.size(); ++step_) {
      if (!posted_) post(schedule_[step_]);
      if (!pending_.test()) return false;
      take(schedule_[step_]);
      posted_ = false;
    }
    return true;
  }
  int waiting_for() const override {
    return pending_.peer() < 0 ? a_.peers[static_cast<size_t>(a_.me)] : pending_.peer();
  }

 private:
  // What MPI reads and writes.
  struct Messages {
    std::shared_ptr<void> data;
    std::vector<std::byte> received, sent;
  };

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
    if (messages_->received.size() < in) messages_->received.resize(in);
    if (messages_->sent.size() < out) messages_->sent.resize(out);

    // Receives are tested last: they take longest, and then the sends have gone, too.
    std::byte* place = messages_->received.data();
    for (const Move& move : step.receives) {
      const size_t nbytes = wire_.nbytes(elements(move));
      const int peer = a_.peers[static_cast<size_t>(move.peer)];
      pending_.add(a_.channel.receive(buffered(step) ? place : at(move.begin), nbytes, peer, a_.tag), peer);
      place += nbytes;
    }
    place = messages_->sent.data();
    for (const Move& move : step.sends) {
      const size_t nbytes = wire_.nbytes(elements(move));
      const int peer = a_.peers[static_cast<size_t>(move.peer)];
      const void* data = at(move.begin);
      if (wire_.rounds()) {
        wire_.encode(data, place, elements(move));
        data = place;
        place += nbytes;
      }
      pending_.add(a_.channel.send(data, nbytes, peer, a_.tag), peer);
    }
    posted_ = true;
  }

  // Everything has arrived.
  void take(const Step& step) {
    if (!buffered(step) || step.receives.empty()) return;
    std::vector<std::pair<int, const std::byte*>> parts;
    const std::byte* place = messages_->received.data();
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
  std::shared_ptr<Messages> messages_;
  Pending pending_;
};

}  // namespace

std::unique_ptr<Allreduce> make_allreduce(Algorithm algorithm, const AllreduceArgs& args) {
  constexpr Schedule (*schedules[])(int, int, size_t) = {recursive_doubling, rabenseifner, ring, pairwise};
  const auto p = static_cast<int>(args.peers.size());
  return std::make_unique<ScheduleRunner>(args, schedules[static_cast<size_t>(algorithm)](p, args.me, args.count));
}

}  // namespace keras_hpc
