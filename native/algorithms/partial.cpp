// SPDX-License-Identifier: Apache-2.0
#include "algorithms/partial.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"

namespace keras_hpc {
namespace {

// All ranks' schedules, cut where any of them, or who needs what, changes: into *segments* of elements.
class Pruning {
 public:
  Pruning(const std::vector<Schedule>& of_ranks, size_t count, const Partial& how) : of_ranks_(of_ranks), how_(how) {
    find_segments(count);
    find_messages();
    find_order();
    if (how.flow == Flow::from_givers) drop_what_nobody_has();
    if (how.flow == Flow::to_takers) drop_what_nobody_needs();
  }

  Schedule left_of(int me) const {
    Schedule left;
    for (size_t i = 0; i < of_ranks_[at(me)].size(); ++i) {
      const Step& step = of_ranks_[at(me)][i];
      Step& kept = left.emplace_back();
      kept.adds = step.adds;
      kept.round_begin = step.round_begin;
      kept.round_end = step.round_end;
      for (const Part& part : parts_received(me, i))
        for (const size_t message : part.messages)
          add_move(kept.receives, messages_[message].from, bounds_[part.begin], bounds_[part.end]);
      for (const size_t message : steps_[at(me)][i].sends)
        for (const Part& part : parts_received(messages_[message].to, messages_[message].to_step))
          if (std::count(part.messages.begin(), part.messages.end(), message) > 0)
            add_move(kept.sends, messages_[message].to, bounds_[part.begin], bounds_[part.end]);
    }
    return left;
  }

 private:
  struct Message {
    int from, to;
    size_t to_step;
    size_t begin, end;       // segments
    std::vector<char> kept;  // of them
  };
  struct StepMessages {
    std::vector<size_t> sends, receives;
  };
  struct Event {
    int rank;
    size_t step;
    bool completes;  // else it begins, and data set out as they are
  };
  // Neighbouring segments that a rank receives, in a step, from the same ranks.
  struct Part {
    size_t begin, end;
    std::vector<size_t> messages;
  };

  void find_segments(size_t count) {
    std::set<size_t> bounds = {0, count};
    for (const Schedule& schedule : of_ranks_)
      for (const Step& step : schedule)
        for (const auto* moves : {&step.sends, &step.receives})
          for (const Move& move : *moves) bounds.insert({move.begin, move.end});
    for (const Extent& extent : how_.extents) bounds.insert({extent.begin, extent.end});
    bounds_.assign(bounds.begin(), bounds.end());
    peer_of_.assign(bounds_.size() - 1, kNobody);
    for (const Extent& extent : how_.extents)
      std::fill(peer_of_.begin() + static_cast<std::ptrdiff_t>(segment(extent.begin)),
                peer_of_.begin() + static_cast<std::ptrdiff_t>(segment(extent.end)), extent.peer);
  }

  size_t segment(size_t element) const {
    return static_cast<size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), element) - bounds_.begin());
  }

  // Between two ranks messages are received in the order in which they are sent.
  void find_messages() {
    std::map<std::pair<int, int>, std::vector<size_t>> between;
    steps_.resize(of_ranks_.size());
    for (size_t rank = 0; rank < of_ranks_.size(); ++rank) {
      steps_[rank].resize(of_ranks_[rank].size());
      for (size_t i = 0; i < of_ranks_[rank].size(); ++i)
        for (const Move& move : of_ranks_[rank][i].sends) {
          const size_t begin = segment(move.begin), end = segment(move.end);
          between[{static_cast<int>(rank), move.peer}].push_back(messages_.size());
          steps_[rank][i].sends.push_back(messages_.size());
          messages_.push_back({static_cast<int>(rank), move.peer, 0, begin, end, std::vector<char>(end - begin, 1)});
        }
    }
    std::map<std::pair<int, int>, size_t> taken;
    for (size_t rank = 0; rank < of_ranks_.size(); ++rank)
      for (size_t i = 0; i < of_ranks_[rank].size(); ++i)
        for (const Move& move : of_ranks_[rank][i].receives) {
          const std::pair<int, int> pair = {move.peer, static_cast<int>(rank)};
          const size_t message = between.at(pair).at(taken[pair]++);
          messages_[message].to_step = i;
          steps_[rank][i].receives.push_back(message);
        }
  }

  // One of the orders in which ranks may go through their steps: which one does not matter, as messages are fixed.
  void find_order() {
    std::vector<size_t> next(of_ranks_.size(), 0);
    std::vector<char> begun(of_ranks_.size(), 0), sent(messages_.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < of_ranks_.size(); ++rank) {
        if (next[rank] == steps_[rank].size()) continue;
        const StepMessages& step = steps_[rank][next[rank]];
        if (!begun[rank]) {
          begun[rank] = 1;
          moved = true;
          for (const size_t message : step.sends) sent[message] = 1;
          order_.push_back({static_cast<int>(rank), next[rank], false});
        }
        const auto is_sent = [&](size_t message) { return sent[message] != 0; };
        if (!std::all_of(step.receives.begin(), step.receives.end(), is_sent)) continue;
        order_.push_back({static_cast<int>(rank), next[rank], true});
        ++next[rank];
        begun[rank] = 0;
        moved = true;
      }
    }
    for (size_t rank = 0; rank < of_ranks_.size(); ++rank)
      if (next[rank] != steps_[rank].size()) throw Error("The schedules of ranks do not fit together.");
  }

  // Calls f(message, segment within it, whether this rank has or needs the segment).
  template <class F>
  void for_segments(int rank, const std::vector<size_t>& messages, std::vector<std::vector<char>>& known, F&& f) {
    for (const size_t number : messages) {
      Message& message = messages_[number];
      for (size_t s = message.begin; s < message.end; ++s) f(message.kept[s - message.begin], known[at(rank)][s]);
    }
  }

  // Who has the value of the one that gives it has the sum.
  void drop_what_nobody_has() {
    std::vector<std::vector<char>> has(of_ranks_.size(), std::vector<char>(peer_of_.size(), 0));
    for (size_t s = 0; s < peer_of_.size(); ++s)
      if (peer_of_[s] >= 0) has[at(peer_of_[s])][s] = 1;
    for (const Event& event : order_) {
      const StepMessages& step = steps_[at(event.rank)][event.step];
      if (!event.completes)
        for_segments(event.rank, step.sends, has, [](char& kept, char& mine) { kept = mine; });
      else
        for_segments(event.rank, step.receives, has, [](char& kept, char& mine) {
          kept = kept && !mine;
          mine = mine || kept;
        });
    }
  }

  void drop_what_nobody_needs() {
    std::vector<std::vector<char>> needs(of_ranks_.size(), std::vector<char>(peer_of_.size(), 0));
    for (size_t rank = 0; rank < needs.size(); ++rank)
      for (size_t s = 0; s < peer_of_.size(); ++s)
        needs[rank][s] = peer_of_[s] == static_cast<int>(rank) || peer_of_[s] == Extent::kEverybody;
    for (auto event = order_.rbegin(); event != order_.rend(); ++event) {
      const StepMessages& step = steps_[at(event->rank)][event->step];
      const bool adds = of_ranks_[at(event->rank)][event->step].adds;
      if (event->completes)
        for_segments(event->rank, step.receives, needs, [adds](char& kept, char& mine) {
          kept = mine;
          if (kept && !adds) mine = 0;  // replaced: what was there before matters no more
        });
      else
        for_segments(event->rank, step.sends, needs, [](char& kept, char& mine) { mine = mine || kept; });
    }
  }

  std::vector<Part> parts_received(int rank, size_t step) const {
    std::vector<Part> parts;
    for (size_t s = 0; s < peer_of_.size(); ++s) {
      std::vector<size_t> from;
      for (const size_t number : steps_[at(rank)][step].receives) {
        const Message& message = messages_[number];
        if (message.begin <= s && s < message.end && message.kept[s - message.begin]) from.push_back(number);
      }
      if (from.empty()) continue;
      if (!parts.empty() && parts.back().end == s && parts.back().messages == from)
        parts.back().end = s + 1;
      else
        parts.push_back({s, s + 1, std::move(from)});
    }
    return parts;
  }

  static constexpr int kNobody = -2;

  const std::vector<Schedule>& of_ranks_;
  const Partial& how_;
  std::vector<size_t> bounds_;  // of segments
  std::vector<int> peer_of_;    // [segment] who needs or gives it
  std::vector<Message> messages_;
  std::vector<std::vector<StepMessages>> steps_;  // [rank][step]
  std::vector<Event> order_;
};

}  // namespace

Schedule partial(const std::vector<Schedule>& of_ranks, int me, size_t count, const Partial& how) {
  if (how.flow == Flow::to_all) return of_ranks[at(me)];
  return Pruning(of_ranks, count, how).left_of(me);
}

}  // namespace keras_hpc
