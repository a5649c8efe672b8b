// SPDX-License-Identifier: Apache-2.0
#include "simulator/mailboxes.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <simgrid/s4u.hpp>
#include <string>
#include <tuple>
#include <utility>

#include "simulator/simulated.hpp"

namespace keras_hpc::simulated {
namespace {

// What is longer is a gradient, of which only the size matters: but a short one has the ranks' weight behind it.
constexpr size_t kCopiedBytes = 64, kShortBytes = 32 << 10;

// The end of a message.
struct Payload {
  size_t begin = 0, nbytes = 0;
  char bytes[kCopiedBytes];
};

// Of all ranks, which are in this process.
std::map<std::pair<int, int>, long> threads;

long thread_of(int number, int rank) {
  const auto found = threads.find({number, rank});
  return found == threads.end() ? pid_of(rank) : found->second;
}

// SMPI would have what they point to copied.
simgrid::s4u::CommPtr hand_over_pointers(const simgrid::s4u::CommPtr& comm) {
  return comm->set_copy_data_callback(simgrid::s4u::Comm::copy_pointer_callback);
}

bool has_ended(const simgrid::s4u::CommPtr& comm) {
  if (!comm->test()) return false;
  // SimGrid 3.32 forgets what an actor has waited for, and keeps what it has tested, in a list that it searches.
  comm->set_state(simgrid::s4u::Activity::State::STARTED);
  comm->wait();
  return true;
}

class SentAtOnce final : public Request {
 public:
  bool test() override { return true; }
};

class Transfer : public Request {
 public:
  bool test() final {
    if (finished_) return true;
    // Nothing can have happened since it was last looked at, if time has not gone on.
    if (looked_at_ == now()) return false;
    looked_at_ = now();
    finished_ = has_ended(comm_);
    finished_ ? end() : watch(comm_);
    return finished_;
  }

 protected:
  virtual void end() {}
  simgrid::s4u::CommPtr comm_;

 private:
  bool finished_ = false;
  double looked_at_ = -1;
};

class Sent final : public Transfer {
 public:
  explicit Sent(simgrid::s4u::CommPtr comm) {
    comm_ = std::move(comm);
    comm_->start();
  }
};

class Received final : public Transfer {
 public:
  Received(simgrid::s4u::Mailbox& mailbox, void* data) : data_(data) {
    comm_ = mailbox.get_init();
    comm_->set_dst_data(reinterpret_cast<void**>(&payload_), sizeof payload_);
    hand_over_pointers(comm_)->start();
  }

 private:
  void end() override {
    const std::unique_ptr<Payload> payload(payload_);
    std::memcpy(static_cast<char*>(data_) + payload->begin, payload->bytes, payload->nbytes);
  }

  void* data_;
  Payload* payload_ = nullptr;
};

class MailboxChannel final : public Channel {
 public:
  MailboxChannel(std::unique_ptr<Channel> mpi, int number, int rank, double overhead_s)
      : mpi_(std::move(mpi)), number_(number), rank_(rank), overhead_s_(overhead_s) {}

  RequestPtr send(const void* data, size_t nbytes, int peer, int tag) override {
    work(overhead_s_);
    auto payload = std::make_unique<Payload>();
    if (nbytes <= kShortBytes) {
      payload->nbytes = std::min(nbytes, kCopiedBytes);
      payload->begin = nbytes - payload->nbytes;
      std::memcpy(payload->bytes, static_cast<const char*>(data) + payload->begin, payload->nbytes);
    }
    const auto comm = hand_over_pointers(mailbox(rank_, peer, tag, nbytes).put_init(payload.release(), nbytes));
    if (nbytes > kEagerBytes) return std::make_unique<Sent>(comm);
    comm->start();
    on_way_.push_back(comm);
    while (!on_way_.empty() && has_ended(on_way_.front())) on_way_.pop_front();
    return std::make_unique<SentAtOnce>();
  }
  RequestPtr receive(void* data, size_t nbytes, int peer, int tag) override {
    work(overhead_s_);
    return std::make_unique<Received>(mailbox(peer, rank_, tag, nbytes), data);
  }

  RequestPtr broadcast(void* data, size_t nbytes, int root) override { return mpi_->broadcast(data, nbytes, root); }
  RequestPtr allgather(const void* in, void* out, const std::vector<size_t>& nbytes_by_rank) override {
    return mpi_->allgather(in, out, nbytes_by_rank);
  }
  RequestPtr barrier() override { return mpi_->barrier(); }

 private:
  // Of all messages from a rank to another one that have this tag. The eager ones have one of their own, whose receiver
  // is known beforehand.
  simgrid::s4u::Mailbox& mailbox(int from, int to, int tag, size_t nbytes) {
    const bool eager = nbytes <= kEagerBytes;
    simgrid::s4u::Mailbox*& known = mailboxes_[{from, to, tag, eager}];
    if (known == nullptr) {
      std::string name = eager ? "eager" : "";
      for (const int part : {number_, from, to, tag}) name += ":" + std::to_string(part);
      known = simgrid::s4u::Mailbox::by_name(name);
      if (eager) known->set_receiver(simgrid::s4u::Actor::by_pid(thread_of(number_, to)));
    }
    return *known;
  }

  std::unique_ptr<Channel> mpi_;
  const int number_, rank_;
  const double overhead_s_;
  std::map<std::tuple<int, int, int, bool>, simgrid::s4u::Mailbox*> mailboxes_;
  std::deque<simgrid::s4u::CommPtr> on_way_;  // of those that were sent at once
};

}  // namespace

std::unique_ptr<Channel> make_mailbox_channel(std::unique_ptr<Channel> mpi, int number, int rank, double overhead_s) {
  return std::make_unique<MailboxChannel>(std::move(mpi), number, rank, overhead_s);
}

void serve(int number, int rank, long thread) {
  threads[{number, rank}] = thread;
}

}  // namespace keras_hpc::simulated
