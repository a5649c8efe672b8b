// SPDX-License-Identifier: Apache-2.0
// The exchanges of a team, and those that are under way.
//
// All ranks start them in one order, and wait for them in that order. A start never blocks: what other ranks of the
// node have no room for yet goes out during the waits. A wait depends only on starts that come before it in that order,
// so ranks that keep to it cannot deadlock; those that do not are told, because each message says what it belongs to.
//
// What is given to a start is read, and the result of a wait written, by the threads that call these only. Between
// nodes, messages are in memory of the engine: MPI may go on with it when this rank has given up.
#pragma once
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/context.hpp"
#include "engine/exchange.hpp"
#include "engine/mailboxes.hpp"
#include "transport/pending.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {

class Exchanges {
 public:
  // Collective.
  Exchanges(const TeamContext& team, Transport& transport);
  ~Exchanges();

  // Ranks of the node to which this exchange is the first to send something from here.
  std::vector<int> new_neighbours(const ExchangeSpec& spec) const;
  // Collective; ranks have agreed on the name. `most`: the largest number of new neighbours of a rank. Returns its
  // number.
  int add(ExchangeSpec spec, size_t most, Transport& transport, Channel& control);
  const ExchangeSpec& spec(int exchange) const;

  // Sends rows of `data`, which must stay valid until wait has returned, with or without an error.
  void start(int exchange, const ExchangeShape& shape, const void* data);
  // Blocks until `result` is there. It and `data` may not overlap.
  void wait(int exchange, bool adjoint, void* result);
  // Forgets what is under way. From then on nothing of it is read or written any more.
  void withdraw();
  size_t segment_bytes() const { return mailboxes_.segment_bytes(); }

 private:
  struct Header;
  struct Stream;     // to or from a rank of this node
  struct Message;    // to or from another node
  struct Operation;  // one that was started
  class Waiting;

  bool advance();
  bool write(Stream& stream);
  bool read(Stream& stream, const Operation& operation);
  bool has_come(Message& message, const Operation& operation) const;
  void check(const Header& header, const Operation& operation, int rank) const;
  void finish(Operation& operation);
  std::string name_of(uint32_t exchange, bool adjoint) const;
  int local(int rank) const;  // -1: on another node

  const TeamContext& team_;
  const Topology& topology_;
  std::unique_ptr<Channel> channel_;
  Mailboxes mailboxes_;
  mutable std::mutex specs_mutex_;  // never held for long: who asks for one may hold Python's lock
  std::deque<ExchangeSpec> specs_;
  std::mutex mutex_;                 // of all that follows
  std::list<Operation> operations_;  // a deque cannot be of a type that is not known yet
  uint64_t started_ = 0;
};

}  // namespace keras_hpc
