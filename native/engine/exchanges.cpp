// SPDX-License-Identifier: Apache-2.0
#include "engine/exchanges.hpp"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/trace.hpp"

namespace keras_hpc {
namespace {

constexpr int kTag = 1;  // messages between two ranks come in order

template <typename Use>
void for_each_piece(const Pieces& pieces, uint64_t nbytes, const Use& use) {
  for (uint64_t done = 0; done < nbytes;) {
    const auto [piece, rest] = pieces.at(done);
    use(piece, rest);
    done += rest;
  }
}

}  // namespace

// What comes before the rows of a message.
struct Exchanges::Header {
  uint64_t number;  // of the start, over all exchanges of the team
  uint32_t exchange;
  uint32_t adjoint;
  uint64_t nbytes;
  uint64_t outer;
};

struct Exchanges::Stream {
  Stream(int to_or_from, int its_local_rank, const Header& head)
      : rank(to_or_from), local(its_local_rank), header(head) {}

  int rank, local;
  Header header;                 // of a read, what is expected
  Header found{};                // and what came
  Pieces pieces;                 // where the rows are
  uint64_t done = 0;             // bytes, the header's among them
  std::vector<std::byte> block;  // of an adjoint: what is added up later
  bool is_done() const { return done == sizeof header + header.nbytes; }
  // Where it goes on, and how many bytes lie together there. The header comes first.
  std::pair<std::byte*, size_t> next(Header& head) const {
    if (done < sizeof head) return {reinterpret_cast<std::byte*>(&head) + done, sizeof head - done};
    return pieces.at(done - sizeof head);
  }
};

struct Exchanges::Message {
  Message(int to_or_from, size_t size)
      : rank(to_or_from), nbytes(size), memory(message_memory(size)), pending(memory) {}

  int rank;
  size_t nbytes;
  std::shared_ptr<std::byte> memory;  // the header, and then the rows
  Pending pending;
  bool done = false;
};

struct Exchanges::Operation {
  int exchange;
  const ExchangeSpec& spec;
  ExchangeShape shape;
  uint64_t number;
  const std::byte* data;
  bool is_awaited = false;
  std::byte* result = nullptr;  // once it is
  std::vector<Stream> writes, reads;
  std::deque<Message> sends, receives;

  bool is_done() const {
    const auto done = [](const Stream& stream) { return stream.is_done(); };
    const auto there = [](const Message& message) { return message.done; };
    return std::all_of(writes.begin(), writes.end(), done) && std::all_of(reads.begin(), reads.end(), done) &&
           std::all_of(sends.begin(), sends.end(), there) && std::all_of(receives.begin(), receives.end(), there);
  }
  // Ranks that have not sent what this one needs, or not taken what it sends.
  std::vector<int> missing() const {
    std::vector<int> found;
    for (const auto* streams : {&reads, &writes})
      for (const Stream& stream : *streams)
        if (!stream.is_done()) found.push_back(stream.rank);
    for (const auto* messages : {&receives, &sends})
      for (const Message& message : *messages)
        if (!message.done) found.push_back(message.rank);
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }
};

Exchanges::Exchanges(const TeamContext& team, Transport& transport)
    : team_(team), topology_(*team.topology), channel_(transport.open_channel()), mailboxes_(team) {}

Exchanges::~Exchanges() = default;

std::vector<int> Exchanges::new_neighbours(const ExchangeSpec& spec) const {
  std::vector<int> found;
  for (const bool adjoint : {false, true})
    for (const Shipment& shipment : outgoing(spec, adjoint)) {
      const int neighbour = local(shipment.rank);
      const bool is_known = neighbour < 0 || mailboxes_.reaches(neighbour);
      if (!is_known && std::find(found.begin(), found.end(), neighbour) == found.end()) found.push_back(neighbour);
    }
  return found;
}

int Exchanges::add(ExchangeSpec spec, size_t most, Transport& transport, Channel& control) {
  mailboxes_.add(new_neighbours(spec), most, transport, control);
  const std::lock_guard lock(specs_mutex_);
  specs_.push_back(std::move(spec));  // others stay where they are
  return static_cast<int>(specs_.size()) - 1;
}

const ExchangeSpec& Exchanges::spec(int exchange) const {
  const std::lock_guard lock(specs_mutex_);
  if (exchange < 0 || at(exchange) >= specs_.size())
    throw Error("The team has no exchange number " + std::to_string(exchange) + ".");
  return specs_[at(exchange)];
}

std::string Exchanges::name_of(uint32_t exchange, bool adjoint) const {
  const std::lock_guard lock(specs_mutex_);
  const std::string name = exchange < specs_.size() ? specs_[exchange].name : "number " + std::to_string(exchange);
  return "exchange " + name + (adjoint ? " backward" : " forward");
}

int Exchanges::local(int rank) const {
  const auto& ranks = topology_.local_ranks();
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

// ---- start

void Exchanges::start(int exchange, const ExchangeShape& shape, const void* data) {
  const ExchangeSpec& spec = this->spec(exchange);
  if (shape.outer < 0 || shape.inner < 0 || shape.inner % spec.cells != 0)
    throw Error("Exchange '" + spec.name + "': expected numbers of elements >= 0, a whole number for each of " +
                std::to_string(spec.cells) + " cells of a row.");
  const std::lock_guard lock(mutex_);
  team_.failure->throw_if_set();
  ++team_.activity->exchanges;
  Operation& operation = operations_.emplace_back(Operation{
      exchange, spec, shape, ++started_, static_cast<const std::byte*>(data), false, nullptr, {}, {}, {}, {}});
  const auto header_of = [&](const Shipment& shipment) {
    const size_t nbytes = static_cast<size_t>(shape.outer * shipment.rows.size()) * shape.row_bytes();
    return Header{operation.number, static_cast<uint32_t>(exchange), shape.adjoint ? 1U : 0U, nbytes,
                  static_cast<uint64_t>(shape.outer)};
  };
  // Only read from.
  auto* given = const_cast<std::byte*>(operation.data);
  for (const Shipment& shipment : outgoing(spec, shape.adjoint)) {
    const Header header = header_of(shipment);
    Stream rows(shipment.rank, local(shipment.rank), header);
    rows.pieces = Pieces(layout_given(spec, shape), shipment.rows, given);
    if (rows.local >= 0) {
      operation.writes.push_back(std::move(rows));
      continue;
    }
    Message& message = operation.sends.emplace_back(shipment.rank, sizeof header + header.nbytes);
    std::memcpy(message.memory.get(), &header, sizeof header);
    std::byte* place = message.memory.get() + sizeof header;
    for_each_piece(rows.pieces, header.nbytes, [&](const std::byte* piece, size_t n) {
      std::memcpy(place, piece, n);
      place += n;
    });
    message.pending.add(channel_->send(message.memory.get(), sizeof header + header.nbytes, shipment.rank, kTag));
  }
  for (const Shipment& shipment : incoming(spec, shape.adjoint)) {
    const Header header = header_of(shipment);
    const int neighbour = local(shipment.rank);
    if (neighbour >= 0) {
      operation.reads.emplace_back(shipment.rank, neighbour, header);
      continue;
    }
    Message& message = operation.receives.emplace_back(shipment.rank, sizeof header + header.nbytes);
    message.pending.add(channel_->receive(message.memory.get(), sizeof header + header.nbytes, shipment.rank, kTag));
  }
  advance();
}

// ---- progress

// What can be done now, in the order of starts: of messages between two ranks the one that was started first.
bool Exchanges::advance() {
  bool moved = false;
  std::vector<bool> busy(at(topology_.local_size()), false);  // an earlier message to this rank is not out yet
  for (Operation& operation : operations_) {
    for (Stream& stream : operation.writes) {
      if (busy[at(stream.local)] || stream.is_done()) continue;
      moved = write(stream) || moved;
      busy[at(stream.local)] = !stream.is_done();
    }
    for (Message& message : operation.sends) message.done = message.done || message.pending.test();
  }
  if (operations_.empty() || !operations_.front().is_awaited) return moved;
  Operation& first = operations_.front();
  for (Stream& stream : first.reads) moved = read(stream, first) || moved;
  for (Message& message : first.receives) {
    if (message.done || !has_come(message, first)) continue;
    Header header;
    std::memcpy(&header, message.memory.get(), sizeof header);
    check(header, first, message.rank);
    message.done = moved = true;
  }
  return moved;
}

bool Exchanges::write(Stream& stream) {
  bool moved = false;
  while (!stream.is_done()) {
    const auto [from, rest] = stream.next(stream.header);
    const size_t n = mailboxes_.write(stream.local, from, rest);
    if (n == 0) break;
    stream.done += n;
    moved = true;
  }
  if (moved) mailboxes_.notify(stream.local);
  return moved;
}

bool Exchanges::read(Stream& stream, const Operation& operation) {
  bool moved = false;
  while (!stream.is_done()) {
    const auto [to, rest] = stream.next(stream.found);
    const size_t n = mailboxes_.read(stream.local, to, rest);
    if (n == 0) break;
    stream.done += n;
    moved = true;
    if (stream.done == sizeof(Header)) check(stream.found, operation, stream.rank);
  }
  if (moved) mailboxes_.notify(stream.local);
  return moved;
}

// One that is longer than its memory is an error of the network: no header tells what it is.
bool Exchanges::has_come(Message& message, const Operation& operation) const {
  try {
    return message.pending.test();
  } catch (const Error& e) {
    throw NetworkError("A message of rank " + std::to_string(message.rank) + " to rank " +
                           std::to_string(topology_.rank) + " in " +
                           name_of(static_cast<uint32_t>(operation.exchange), operation.shape.adjoint) + ": " +
                           e.what() + " Do all ranks of a group get as many samples?",
                       message.rank);
  }
}

void Exchanges::check(const Header& header, const Operation& operation, int rank) const {
  const auto expected = std::tuple(operation.number, static_cast<uint32_t>(operation.exchange),
                                   operation.shape.adjoint ? 1U : 0U, static_cast<uint64_t>(operation.shape.outer));
  if (std::tuple(header.number, header.exchange, header.adjoint, header.outer) == expected) {
    const auto is_it = [&](const Stream& one) { return one.rank == rank && one.header.nbytes == header.nbytes; };
    const auto fits = [&](const Message& one) {
      return one.rank == rank && one.nbytes == sizeof header + header.nbytes;
    };
    if (std::any_of(operation.reads.begin(), operation.reads.end(), is_it)) return;
    if (std::any_of(operation.receives.begin(), operation.receives.end(), fits)) return;
  }
  throw PlanMismatch("Ranks disagree on what to exchange: '" + name_of(header.exchange, header.adjoint != 0) + "', " +
                         std::to_string(header.outer) + " x rows, " + std::to_string(header.nbytes) +
                         " bytes, number " + std::to_string(header.number) + " on rank " + std::to_string(rank) +
                         "; '" + name_of(static_cast<uint32_t>(operation.exchange), operation.shape.adjoint) + "', " +
                         std::to_string(operation.shape.outer) + " x rows, number " + std::to_string(operation.number) +
                         " on rank " + std::to_string(topology_.rank) +
                         ". Do all ranks of a group get as many samples?",
                     rank);
}

// ---- wait

class Exchanges::Waiting final : public Awaited {
 public:
  Waiting(Exchanges& exchanges, const Operation& operation)
      : exchanges_(exchanges),
        what_(exchanges.name_of(static_cast<uint32_t>(operation.exchange), operation.shape.adjoint)),
        operation_(operation) {}
  std::string name() const override {
    return "Waited in " + what_ + " (team " + std::to_string(exchanges_.team_.number) + ", rank " +
           std::to_string(exchanges_.topology_.rank) + ")";
  }
  // Asked by the thread that waits only. A rank may have written its rows, and have left, since that has looked.
  std::vector<int> missing() const override {
    exchanges_.advance();
    return operation_.missing();
  }
  bool is_outside() const override { return !operation_.receives.empty() || !operation_.sends.empty(); }
  // Asked by other threads, while this one works on the operation: so of a copy, taken when the wait becomes long.
  Stall stall() const override {
    return {"exchange", operation_.number, what_.substr(sizeof "exchange"), -1,
            [missing = operation_.missing()] { return missing; }};
  }

 private:
  Exchanges& exchanges_;
  const std::string what_;
  const Operation& operation_;
};

void Exchanges::wait(int exchange, bool adjoint, void* result) {
  const std::lock_guard lock(mutex_);
  team_.failure->throw_if_set();
  if (operations_.empty() || operations_.front().exchange != exchange || operations_.front().shape.adjoint != adjoint)
    throw Error("Exchanges are waited for in the order in which they were started. Received: a wait for " +
                name_of(static_cast<uint32_t>(exchange), adjoint) + " where " +
                (operations_.empty()
                     ? "none was started."
                     : name_of(static_cast<uint32_t>(operations_.front().exchange), operations_.front().shape.adjoint) +
                           " is the first."));
  Operation& operation = operations_.front();
  if (result == nullptr && operation.shape.outer > 0 && layout_wanted(operation.spec, operation.shape).nbytes() > 0)
    throw Error("Exchange '" + operation.spec.name + "': expected memory for the result, not a null pointer.");
  operation.is_awaited = true;
  operation.result = static_cast<std::byte*>(result);
  const std::vector<Shipment> arriving = incoming(operation.spec, adjoint);
  for (Stream& stream : operation.reads) {
    const auto shipment =
        std::find_if(arriving.begin(), arriving.end(), [&](const auto& s) { return s.rank == stream.rank; });
    const RowLayout layout = layout_wanted(operation.spec, operation.shape);
    if (adjoint) {
      stream.block.resize(stream.header.nbytes);
      stream.pieces = Pieces(RowLayout{shipment->rows.size(), layout.row, layout.row, 0}, {0, shipment->rows.size()},
                             stream.block.data());
    } else {
      stream.pieces = Pieces(layout, shipment->rows, operation.result);
    }
  }
  advance();
  place_own(operation.spec, operation.shape, operation.data, operation.result);  // while others are at it
  const auto ready = [&] {
    team_.failure->throw_if_set();
    while (advance()) {
    }
    return operation.is_done();
  };
  const auto begin = Clock::now();
  const Waiting waiting(*this, operation);
  int idle = -1;
  if (!wait_watched(team_, team_.exchangers[topology_.local_rank], ready, waiting, &idle) && !operation.is_done()) {
    std::vector<int> missing = operation.missing(), late = team_.failure->outside_mpi(missing);
    if (late.empty() && idle >= 0) late = {idle};
    if (!late.empty()) missing = late;
    std::string ranks;
    for (const int rank : missing) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    throw Timeout("Waited " + std::to_string(static_cast<int>(team_.timeout_seconds)) + " s in " +
                      name_of(static_cast<uint32_t>(exchange), adjoint) + " (team " + std::to_string(team_.number) +
                      ", rank " + std::to_string(topology_.rank) + "), from rank " + ranks +
                      ". Do all ranks run the same steps?",
                  late.empty() ? -1 : late[0]);
  }
  if (trace::enabled) trace::record(operation.spec.name, adjoint ? "rows backward" : "rows", team_.number, begin);
  finish(operation);
  operations_.pop_front();
}

// All has come. Gradients are added up in the order of ranks, whatever the order in which they came.
void Exchanges::finish(Operation& operation) {
  const ExchangeShape& shape = operation.shape;
  for (const Shipment& shipment : incoming(operation.spec, shape.adjoint)) {
    const auto is_from = [&](const auto& one) { return one.rank == shipment.rank; };
    const auto message = std::find_if(operation.receives.begin(), operation.receives.end(), is_from);
    const bool is_message = message != operation.receives.end();
    if (shape.adjoint) {
      const auto stream = std::find_if(operation.reads.begin(), operation.reads.end(), is_from);
      const std::byte* block = is_message ? message->memory.get() + sizeof(Header) : stream->block.data();
      add_rows(operation.spec, shape, shipment, block, operation.result);
    } else if (is_message) {
      const std::byte* from = message->memory.get() + sizeof(Header);
      const Pieces pieces(layout_wanted(operation.spec, shape), shipment.rows, operation.result);
      for_each_piece(pieces, message->nbytes - sizeof(Header), [&](std::byte* piece, size_t n) {
        std::memcpy(piece, from, n);
        from += n;
      });
    }
  }
}

void Exchanges::withdraw() {
  const std::lock_guard lock(mutex_);
  operations_.clear();
}

}  // namespace keras_hpc
