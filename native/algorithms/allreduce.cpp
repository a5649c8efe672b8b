// SPDX-License-Identifier: Apache-2.0
#include "algorithms/allreduce.hpp"

#include <cstring>

#include "common/error.hpp"

namespace keras_hpc {

const char* name_of(Algorithm algorithm) {
  constexpr const char* names[] = {"recursive_doubling", "rabenseifner", "ring", "pairwise", "radix_k", "library"};
  return names[static_cast<size_t>(algorithm)];
}

Algorithm parse_algorithm(const std::string& name) {
  for (const Algorithm algorithm : kAlgorithms)
    if (name == name_of(algorithm)) return algorithm;
  throw Error(
      "Unknown algorithm of an allreduce. Expected recursive_doubling, rabenseifner, ring, pairwise, radix_k or "
      "library. "
      "Received: " +
      name);
}

Algorithm usual_algorithm(size_t nbytes, size_t peers) {
  // Below it the number of messages decides, above it the number of bytes.
  constexpr size_t small_bytes = 16 << 10;
  // As many messages at once are fast, and one switch carries them; see docs/simulation.md.
  constexpr size_t few_peers = 4, some_peers = 16, many_peers = 64;
  if (nbytes <= small_bytes) return Algorithm::recursive_doubling;
  if (peers <= few_peers) return Algorithm::pairwise;
  if (peers <= many_peers && radices(static_cast<int>(peers)).size() == 2) return Algorithm::radix_k;
  return peers <= some_peers ? Algorithm::pairwise : Algorithm::rabenseifner;
}

const Schedule& Schedules::of(Algorithm algorithm, size_t count, const Partial& how) {
  const auto [place, is_new] = made_.try_emplace({algorithm, count, how});
  if (is_new) {
    constexpr Schedule (*make[])(int, int, size_t) = {recursive_doubling, rabenseifner, ring, pairwise, radix_k};
    const auto of_rank = [&](int rank) {
      return make[static_cast<size_t>(algorithm)](static_cast<int>(peers_.ranks.size()), rank, count);
    };
    if (how.flow == Flow::to_all || peers_.ranks.size() > kPrunedPeers) {
      place->second = of_rank(peers_.me);
    } else {
      std::vector<Schedule> of_ranks;
      for (size_t rank = 0; rank < peers_.ranks.size(); ++rank) of_ranks.push_back(of_rank(static_cast<int>(rank)));
      place->second = partial(of_ranks, peers_.me, count, how);
    }
  }
  return place->second;
}

// ---- an operation

Allreduce::Allreduce(Channel& channel, Schedules& schedules, int tag)
    : channel_(channel),
      schedules_(schedules),
      tag_(tag),
      messages_(std::make_shared<Messages>()),
      pending_(messages_) {}

void Allreduce::begin(Algorithm algorithm, const AllreduceBuffer& buffer) {
  b_ = buffer;
  wire_.set(buffer.dtype, buffer.wire);
  messages_->data = buffer.memory;
  // A sum of two is the same in either order, and this way it is taken where it is needed.
  if (buffer.how.flow != Flow::to_all && schedules_.peers().ranks.size() == 2 && !wire_.rounds())
    algorithm = Algorithm::recursive_doubling;
  if (algorithm == Algorithm::library) {
    Channel* mpi_channel = schedules_.peers().mpi_channel;
    const Op op = buffer.op == Op::mean ? Op::sum : buffer.op;
    if (mpi_channel != nullptr && !wire_.rounds() && mpi_channel->can_allreduce(buffer.dtype, op)) {
      schedule_ = nullptr;
      pending_.add(mpi_channel->iallreduce(buffer.data, buffer.count, buffer.dtype, op));
      return;
    }
    algorithm = usual_algorithm(wire_.nbytes(buffer.count), schedules_.peers().ranks.size());
  }
  schedule_ = &schedules_.of(algorithm, buffer.count, buffer.how);
  step_ = 0;
  posted_ = false;
  if (b_.rider != nullptr) std::memcpy(at(b_.count), b_.rider, sizeof *b_.rider);
  const size_t nbytes = wire_.rounds() ? wire_.nbytes(buffer.count) : 0;
  if (sent_bytes_ >= nbytes) return;
  messages_->sent = message_memory(nbytes);
  sent_bytes_ = nbytes;
}

Progress Allreduce::advance() {
  if (schedule_ == nullptr) return pending_.test() ? Progress::done : Progress::none;
  bool moved = false;
  for (; step_ < schedule_->size(); ++step_, moved = true) {
    const Step& step = (*schedule_)[step_];
    if (!posted_) {
      if (wire_.rounds()) round(step);
      post(step);
      posted_ = moved = true;
    }
    if (!pending_.test()) return moved ? Progress::some : Progress::none;
    take(step);
    posted_ = false;
  }
  if (b_.rider != nullptr) std::memcpy(b_.rider, at(b_.count), sizeof *b_.rider);
  return Progress::done;
}

int Allreduce::waiting_for() const {
  const Peers& peers = schedules_.peers();
  return pending_.peer() < 0 ? peers.ranks[static_cast<size_t>(peers.me)] : pending_.peer();
}

// Rounds what sets out in this step, and what this rank keeps as the others will have it.
void Allreduce::round(const Step& step) {
  const size_t kept = step.round_end - step.round_begin;
  wire_.encode(at(step.round_begin), rounded(step.round_begin), kept);
  wire_.decode(rounded(step.round_begin), at(step.round_begin), kept);
  if (!step.adds) return;  // the rest has been received as it is sent on
  for (const Move& move : step.sends)
    if (move.begin < step.round_begin || move.end > step.round_end)
      wire_.encode(at(move.begin), rounded(move.begin), move.end - move.begin);
}

void Allreduce::post(const Step& step) {
  const Peers& peers = schedules_.peers();
  if (step.adds) {
    size_t nbytes = 0;
    for (const Move& move : step.receives) nbytes += bytes_of(move.begin, move.end);
    if (received_bytes_ < nbytes) {
      messages_->received = message_memory(nbytes);
      received_bytes_ = nbytes;
    }
  }
  // Receives are tested last: they take longest, and then the sends have gone, too.
  std::byte* place = messages_->received.get();
  for (const Move& move : step.receives) {
    const size_t nbytes = bytes_of(move.begin, move.end);
    const int peer = peers.ranks[static_cast<size_t>(move.peer)];
    std::byte* to = wire_.rounds() ? rounded(move.begin) : at(move.begin);
    pending_.add(channel_.receive(step.adds ? place : to, nbytes, peer, tag_), peer);
    place += nbytes;
  }
  for (const Move& move : step.sends) {
    const int peer = peers.ranks[static_cast<size_t>(move.peer)];
    const std::byte* from = wire_.rounds() ? rounded(move.begin) : at(move.begin);
    pending_.add(channel_.send(from, bytes_of(move.begin, move.end), peer, tag_), peer);
  }
}

// Everything has arrived.
void Allreduce::take(const Step& step) {
  if (!step.adds) {
    for (const Move& move : step.receives)
      if (wire_.rounds()) wire_.decode(rounded(move.begin), at(move.begin), move.end - move.begin);
    return;
  }
  const std::byte* place = messages_->received.get();
  for (auto move = step.receives.begin(); move != step.receives.end();) {
    const size_t begin = move->begin, count = move->end - move->begin;
    size_t mine = 0;
    parts_.clear();
    for (; move != step.receives.end() && move->begin == begin; ++move) {
      mine += move->peer < schedules_.peers().me;
      parts_.push_back(place);
      place += bytes_of(begin, begin + count);
    }
    if (b_.in_tree)
      wire_.sum_in_tree(at(begin), parts_, mine, count);
    else
      wire_.combine(b_.op, at(begin), parts_, mine, count);
    if (b_.rider != nullptr && begin + count == b_.count) add_riders(count, mine);
  }
}

// In the order of ranks, as elements are: those behind `count` elements of each part, and this rank's own.
void Allreduce::add_riders(size_t count, size_t mine) {
  double sum = 0;
  for (size_t i = 0; i <= parts_.size(); ++i) {
    double one;
    const void* from =
        i == mine ? at(b_.count) : static_cast<const std::byte*>(parts_[i - (i > mine)]) + wire_.nbytes(count);
    std::memcpy(&one, from, sizeof one);
    sum += one;
  }
  std::memcpy(at(b_.count), &sum, sizeof sum);
}

}  // namespace keras_hpc
