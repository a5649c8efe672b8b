// SPDX-License-Identifier: Apache-2.0
// Plans, layouts, schedules and messages are the engine's own.
#include <mpi.h>

#include <memory>
#include <numeric>
#include <simgrid/s4u.hpp>
#include <string>
#include <vector>

#include "algorithms/allreduce.hpp"
#include "common/index.hpp"
#include "engine/plan.hpp"
#include "simulator/mailboxes.hpp"
#include "simulator/measure.hpp"
#include "simulator/memory.hpp"
#include "simulator/simulated.hpp"
#include "simulator/steps.hpp"
#include "transport/mpi_transport.hpp"

namespace keras_hpc {
namespace {

constexpr double kNoLimit = 1e9;   // seconds
constexpr double kInstant = 1e-9;  // less than what the engine's clock tells apart

// A node has one rank, which shares its segment with nobody.
class SimulatedTransport final : public Transport {
 public:
  SimulatedTransport(std::unique_ptr<Transport> mpi, const Options& options)
      : Transport(mpi->topology()), mpi_(std::move(mpi)), options_(options) {}
  std::unique_ptr<Channel> open_channel() override {
    auto channel = mpi_->open_channel();
    if (options_.messages == "mpi") return channel;
    return simulated::make_mailbox_channel(std::move(channel), channels_++, topology().rank, options_.overhead_s);
  }
  std::unique_ptr<Segment> open_segment(Channel&, size_t engine_bytes, size_t bytes_of_rank) override {
    const size_t nbytes = engine_bytes + bytes_of_rank;
    void* data = simulated::reserve(nbytes);
    return std::make_unique<Segment>(data, nbytes, [data, nbytes] { munmap(data, nbytes); });
  }

 private:
  std::unique_ptr<Transport> mpi_;
  const Options& options_;
  int channels_ = 0;
};

std::unique_ptr<SimulatedTransport> make_transport(int size, const Options& options) {
  mpi::Constants constants{};
  constants.byte = reinterpret_cast<intptr_t>(MPI_BYTE);
  constants.errors_return = reinterpret_cast<intptr_t>(MPI_ERRORS_RETURN);
  constants.status_ignore = reinterpret_cast<intptr_t>(MPI_STATUS_IGNORE);
  constants.in_place = reinterpret_cast<intptr_t>(MPI_IN_PLACE);
  std::vector<int> nodes(static_cast<size_t>(size));
  std::iota(nodes.begin(), nodes.end(), 0);
  auto world = mpi::connect("", sizeof(MPI_Comm), reinterpret_cast<intptr_t>(MPI_COMM_WORLD), constants);
  return std::make_unique<SimulatedTransport>(make_mpi_transport(std::move(world), nodes), options);
}

// A rank's side of a team. The first lane is served by the rank itself.
struct Rank {
  Rank(Transport& transport, int lanes) : failure(transport.topology(), &bell, 1, 0.0) {
    for (int lane = 0; lane < lanes; ++lane) channels.push_back(transport.open_channel());
    context.topology = &transport.topology();
    context.bells = &bell;
    context.callers = &caller;
    context.timeout_seconds = context.stall_seconds = kNoLimit;
    context.activity = &activity;
    context.failure = &failure;
    context.asynchronous_waits = &waits;
  }

  // Nobody else has opened any.
  static int channel_number(int lane) { return lane; }

  template <class Ready, class Look>
  void wait(Ready&& ready, Look&& look) {
    wait_for(context.patience, bell, kNoLimit, ready, look);
  }

  std::vector<std::unique_ptr<Channel>> channels;  // one per lane
  Bell bell{}, caller{};
  Activity activity{kNoLimit};
  Failure failure;
  std::atomic<int> waits{0};
  TeamContext context;
};

void time_allreduce(const Options& options, Rank& rank) {
  const Topology& topology = *rank.context.topology;
  Schedules schedules({topology.peers_of_slice(0), topology.node});
  Allreduce allreduce(*rank.channels[0], schedules, 0);
  const auto memory = message_memory(options.bytes);
  const auto algorithm = options.algorithm_for(options.bytes, static_cast<size_t>(topology.size));
  double least = kNoLimit;
  for (int i = 0; i < options.repeats; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = simulated::now();
    allreduce.begin(algorithm, {memory.get(), options.bytes / sizeof(float), DType::float32, parse_dtype(options.wire),
                                Op::sum, memory});
    // As a lane waits: whatever has moved ends the wait, and with it long naps.
    for (bool done = false; !done;)
      rank.wait(
          [&] {
            const Progress progress = allreduce.advance();
            done = progress == Progress::done;
            return progress != Progress::none;
          },
          [] { return true; });
    least = std::min(least, slowest(simulated::now() - begin));
  }
  if (topology.rank == 0)
    std::printf("{\"nodes\": %d, \"algorithm\": \"%s\", \"bytes\": %zu, \"us\": %.3f}\n", topology.size,
                name_of(algorithm), options.bytes, least * 1e6);
}

// The steps of one rank: its lanes, each a thread with a core of its own.
class Lanes {
 public:
  Lanes(Rank& rank, Plan& plan, const Timeline& timeline, void* data)
      : rank_(rank), plan_(plan), timeline_(timeline), data_(data) {
    for (int lane = 1; lane < lanes(); ++lane) {
      const auto thread = simgrid::s4u::Actor::create("lane", simgrid::s4u::this_actor::get_host(), [this, lane] {
        for (begin_->acquire(); !stopping_; begin_->acquire()) {
          serve(lane);
          end_->release();
        }
        end_->release();
      });
      simulated::serve(rank_.channel_number(lane), rank_.context.topology->rank, thread->get_pid());
    }
  }
  ~Lanes() {
    stopping_ = true;
    together([] {});
  }
  Lanes(const Lanes&) = delete;

  // Gradients come while the node computes for so many seconds from `begin`.
  void step(double begin, double compute_s) {
    begin_at_ = begin;
    compute_s_ = compute_s;
    started_ = 0;
    together([this] { serve(0); });
    for (int t = 0; t < count(); ++t) plan_.release(t);
  }

 private:
  int lanes() const { return static_cast<int>(rank_.channels.size()); }
  int count() const { return static_cast<int>(timeline_.tensors.size()); }
  double due() const {
    if (started_ == count()) return kNoLimit;
    return begin_at_ + compute_s_ * timeline_.ready[at(timeline_.order[at(started_)])];
  }

  template <class Mine>
  void together(Mine&& mine) {
    for (int lane = 1; lane < lanes(); ++lane) begin_->release();
    mine();
    for (int lane = 1; lane < lanes(); ++lane) end_->acquire();
  }

  // Whichever lane comes first starts what is due, which takes no time.
  void serve(int lane) {
    const auto is_over = [&] { return started_ == count() && plan_.is_through(lane); };
    const auto ready = [&] {
      for (; due() <= simulated::now() + kInstant; ++started_) plan_.start(timeline_.order[at(started_)], data_, 1.0);
      simulated::wake_at(due());
      return plan_.advance(lane, *rank_.channels[at(lane)]) || is_over();
    };
    while (!is_over()) rank_.wait(ready, [&] { return plan_.uses_network(lane); });
  }

  Rank& rank_;
  Plan& plan_;
  const Timeline& timeline_;
  void* const data_;
  double begin_at_ = 0, compute_s_ = 0;
  int started_ = 0;
  bool stopping_ = false;
  const simgrid::s4u::SemaphorePtr begin_ = simgrid::s4u::Semaphore::create(0);
  const simgrid::s4u::SemaphorePtr end_ = simgrid::s4u::Semaphore::create(0);
};

void time_steps_of_engine(const Options& options, Rank& rank, Transport& transport) {
  const Topology& topology = *rank.context.topology;
  const Timeline timeline(options.tensors);
  const DType wire = parse_dtype(options.wire);
  const PlanOptions reduction{Op::mean, true, wire == DType::float32 ? std::nullopt : std::optional<DType>(wire), false,
                              options.bucket_bytes};
  Plan plan(
      rank.context, 0, "step", timeline.tensors, reduction, options.lanes,
      [&](size_t nbytes) { return options.algorithm_for(nbytes, static_cast<size_t>(topology.size)); }, transport,
      *rank.channels[0]);
  const size_t space = timeline.largest_bytes();
  void* data = simulated::reserve(space);
  {
    Lanes lanes(rank, plan, timeline, data);
    time_steps(options, topology.rank, topology.size, plan.layout().buckets().size(),
               [&](double begin, double compute_s) { lanes.step(begin, compute_s); });
  }
  munmap(data, space);
}

}  // namespace

void time_engine(const Options& options, int size) {
  const auto transport = make_transport(size, options);
  Rank rank(*transport, options.lanes);
  options.tensors.empty() ? time_allreduce(options, rank) : time_steps_of_engine(options, rank, *transport);
}

}  // namespace keras_hpc
