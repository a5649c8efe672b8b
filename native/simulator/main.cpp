// SPDX-License-Identifier: Apache-2.0
// Times allreduces and training steps of the engine on simulated nodes, one rank on each; smpirun starts it with
// `--option value` pairs, see Options. Rank 0 prints one line of JSON. Plans, layouts, schedules and messages are the
// engine's own; computing is a timeline of when each gradient is there.
#include <mpi.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "algorithms/allreduce.hpp"
#include "common/error.hpp"
#include "engine/plan.hpp"
#include "simulator/simulated.hpp"
#include "transport/mpi_transport.hpp"

namespace keras_hpc {
namespace {

constexpr double kNoLimit = 1e9;             // seconds
constexpr size_t kCopiedBytes = 4096;        // of a message; longer ones are gradients, of which only the size matters
constexpr double kInstant = 1e-9;            // less than what the engine's clock tells apart
constexpr size_t kTensorSpace = 1ull << 36;  // addresses, without memory

struct Options {
  std::string tensors;              // a file: for each, its elements and when it is there, as a share of compute_s
  size_t bytes = 1 << 20;           // of an allreduce, where no tensors are given
  std::string algorithm = "usual";  // the engine's choice; or one by name; or mpi, for an allreduce of the library
  double compute_s = 0.29, update_s = 0.01;
  int repeats = 3;
  std::string wire = "float32";
  size_t bucket_bytes = 0;  // the engine's choice
  std::string variation;    // a file of what a node's steps took, of which each node takes some at random

  Options(int count, char** words) {
    for (int i = 1; i < count; i += 2) {
      const std::string name = words[i];
      if (i + 1 >= count) throw Error("Expected a value after the option. Received: " + name);
      const std::string value = words[i + 1];
      if (name == "--tensors")
        tensors = value;
      else if (name == "--bytes")
        bytes = std::stoull(value);
      else if (name == "--algorithm")
        algorithm = value;
      else if (name == "--compute-s")
        compute_s = std::stod(value);
      else if (name == "--update-s")
        update_s = std::stod(value);
      else if (name == "--repeats")
        repeats = std::stoi(value);
      else if (name == "--wire")
        wire = value;
      else if (name == "--bucket-bytes")
        bucket_bytes = std::stoull(value);
      else if (name == "--variation")
        variation = value;
      else if (name == "--reduce-rate")
        simulated::rates.reduce_bytes_per_s = std::stod(value);
      else if (name == "--copy-rate")
        simulated::rates.copy_bytes_per_s = std::stod(value);
      else if (name == "--convert-rate")
        simulated::rates.convert_bytes_per_s = std::stod(value);
      else
        throw Error("Unknown option. Received: " + name);
    }
  }

  Algorithm algorithm_for(size_t nbytes, size_t peers) const {
    return algorithm == "usual" ? usual_algorithm(nbytes, peers) : parse_algorithm(algorithm);
  }
};

void* reserve(size_t nbytes) {
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw Error("Cannot reserve addresses for simulated memory.");
  return data;
}

// Channels are MPI's. A node has one rank, which shares its segment with nobody.
class SimulatedTransport final : public Transport {
 public:
  explicit SimulatedTransport(std::unique_ptr<Transport> mpi) : Transport(mpi->topology()), mpi_(std::move(mpi)) {}
  std::unique_ptr<Channel> open_channel() override { return mpi_->open_channel(); }
  std::unique_ptr<Segment> open_segment(Channel&, size_t engine_bytes, size_t bytes_of_rank) override {
    const size_t nbytes = engine_bytes + bytes_of_rank;
    void* data = reserve(nbytes);
    return std::make_unique<Segment>(data, nbytes, [data, nbytes] { munmap(data, nbytes); });
  }

 private:
  std::unique_ptr<Transport> mpi_;
};

std::unique_ptr<SimulatedTransport> make_transport(int size) {
  mpi::Constants constants{};
  constants.byte = reinterpret_cast<intptr_t>(MPI_BYTE);
  constants.errors_return = reinterpret_cast<intptr_t>(MPI_ERRORS_RETURN);
  constants.status_ignore = reinterpret_cast<intptr_t>(MPI_STATUS_IGNORE);
  constants.in_place = reinterpret_cast<intptr_t>(MPI_IN_PLACE);
  std::vector<int> nodes(static_cast<size_t>(size));
  std::iota(nodes.begin(), nodes.end(), 0);
  auto world = mpi::connect("", sizeof(MPI_Comm), reinterpret_cast<intptr_t>(MPI_COMM_WORLD), constants);
  return std::make_unique<SimulatedTransport>(make_mpi_transport(std::move(world), nodes));
}

// A rank's side of a team, which has one lane here, served by the rank itself.
struct Rank {
  explicit Rank(Transport& transport)
      : channel(transport.open_channel()), failure(transport.topology(), &bell, &caller, 0.0) {
    context.topology = &transport.topology();
    context.bells = &bell;
    context.callers = &caller;
    context.timeout_seconds = context.stall_seconds = kNoLimit;
    context.activity = &activity;
    context.failure = &failure;
    context.asynchronous_waits = &waits;
  }

  template <class Ready, class Look>
  void wait(Ready&& ready, Look&& look) {
    wait_for(context.patience, bell, kNoLimit, ready, look);
  }

  std::unique_ptr<Channel> channel;
  Bell bell{}, caller{};
  Activity activity{kNoLimit};
  Failure failure;
  std::atomic<int> waits{0};
  TeamContext context;
};

double slowest(double seconds) {
  double most = 0;
  MPI_Allreduce(&seconds, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return most;
}

// The library's own, of the kind that smpirun was told. Its sums take no time here.
void time_library(const Options& options, int me, int size) {
  const auto memory = message_memory(options.bytes);
  double least = kNoLimit;
  for (int i = 0; i < options.repeats; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = simulated::now();
    MPI_Allreduce(MPI_IN_PLACE, memory.get(), static_cast<int>(options.bytes / sizeof(float)), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
    least = std::min(least, slowest(simulated::now() - begin));
  }
  if (me == 0)
    std::printf("{\"nodes\": %d, \"algorithm\": \"mpi\", \"bytes\": %zu, \"us\": %.3f}\n", size, options.bytes,
                least * 1e6);
}

void time_allreduce(const Options& options, Rank& rank) {
  const Topology& topology = *rank.context.topology;
  Schedules schedules({topology.peers_of_slice(0), topology.node});
  Allreduce allreduce(*rank.channel, schedules, 0);
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

struct Timeline {
  std::vector<TensorSpec> tensors;
  std::vector<double> ready;  // as a share of computing

  explicit Timeline(const std::string& path) {
    std::ifstream file(path);
    int64_t count;
    for (double at; file >> count >> at;) {
      tensors.push_back({std::to_string(tensors.size()), DType::float32, count});
      ready.push_back(at);
    }
    if (tensors.empty() || !file.eof() || !std::is_sorted(ready.begin(), ready.end()))
      throw Error("Expected a file of tensors in the order of a step: elements and time. Received: " + path);
  }
};

// How long each step of one node takes, as a share of the mean: measured ones, drawn at random.
class Variation {
 public:
  Variation(const std::string& path, int rank) : random_(static_cast<uint64_t>(rank)) {
    if (path.empty()) return;
    std::ifstream file(path);
    for (double seconds; file >> seconds;) steps_.push_back(seconds);
    if (steps_.size() < 2 || !file.eof()) throw Error("Expected a file of seconds, two or more. Received: " + path);
    const double mean = std::accumulate(steps_.begin(), steps_.end(), 0.0) / static_cast<double>(steps_.size());
    for (double& step : steps_) step /= mean;
  }
  double next() { return steps_.empty() ? 1.0 : steps_[random_() % steps_.size()]; }

 private:
  std::mt19937_64 random_;  // the same in every run
  std::vector<double> steps_;
};

void time_steps(const Options& options, Rank& rank, Transport& transport) {
  const Topology& topology = *rank.context.topology;
  const Timeline timeline(options.tensors);
  const int count = static_cast<int>(timeline.tensors.size());
  const DType wire = parse_dtype(options.wire);
  const PlanOptions reduction{Op::mean, true, wire == DType::float32 ? std::nullopt : std::optional<DType>(wire), false,
                              options.bucket_bytes};
  Plan plan(
      rank.context, 0, "step", timeline.tensors, reduction, 1,
      [&](size_t nbytes) { return options.algorithm_for(nbytes, static_cast<size_t>(topology.size)); }, transport,
      *rank.channel);
  void* data = reserve(kTensorSpace);
  const double first = [] {
    MPI_Barrier(MPI_COMM_WORLD);
    return simulated::now();
  }();
  double exposed = 0;
  Variation variation(options.variation, topology.rank);
  for (int step = 0; step < options.repeats; ++step) {
    const double begin = simulated::now(), compute_s = options.compute_s * variation.next();
    const auto due = [&](int t) { return begin + compute_s * timeline.ready[static_cast<size_t>(t)]; };
    int started = 0;
    const auto is_over = [&] { return started == count && plan.first_incomplete(0) == count; };
    const auto ready = [&] {
      for (; started < count && due(started) <= simulated::now() + kInstant; ++started) plan.start(started, data, 1.0);
      simulated::wake_at(started < count ? due(started) : kNoLimit);
      return plan.advance(0, *rank.channel) || is_over();
    };
    while (!is_over()) rank.wait(ready, [&] { return plan.uses_network(0); });
    for (int t = 0; t < count; ++t) plan.release(t);
    const double left = begin + compute_s - simulated::now();
    if (left > 0) simulated::sleep(left);
    exposed += std::max(0.0, -left);
    simulated::sleep(options.update_s);
  }
  munmap(data, kTensorSpace);
  const double step_s = slowest(simulated::now() - first) / options.repeats;
  const double exposed_s = slowest(exposed) / options.repeats;
  if (topology.rank == 0)
    std::printf(
        "{\"nodes\": %d, \"algorithm\": \"%s\", \"buckets\": %zu, \"step_ms\": %.6f, \"exposed_ms\": %.6f, "
        "\"efficiency\": %.6f}\n",
        topology.size, options.algorithm.c_str(), plan.layout().buckets().size(), step_s * 1e3, exposed_s * 1e3,
        (options.compute_s + options.update_s) / step_s);
}

// Of gradients no byte is looked at.
void copy_small(simgrid::kernel::activity::CommImpl* message, void* data, size_t nbytes) {
  if (nbytes <= kCopiedBytes) smpi_comm_copy_buffer_callback(message, data, nbytes);
}

}  // namespace
}  // namespace keras_hpc

int main(int count, char** words) {
  using namespace keras_hpc;
  MPI_Init(&count, &words);
  // SimGrid 3.32 declares this parameter with a base of the class that its own function takes.
  smpi_comm_set_copy_data_callback(reinterpret_cast<void (*)(smx_activity_t, void*, size_t)>(copy_small));
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  try {
    const Options options(count, words);
    int me = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    if (options.algorithm == "mpi") {
      if (!options.tensors.empty()) throw Error("The library's allreduce is timed alone. Received: --tensors, too");
      time_library(options, me, size);
      MPI_Finalize();
      return 0;
    }
    const auto transport = make_transport(size);
    Rank rank(*transport);
    options.tensors.empty() ? time_allreduce(options, rank) : time_steps(options, rank, *transport);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
