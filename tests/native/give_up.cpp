// Two processes whose calls are given up at random moments, again and again, and the program lives on:
//   mpiexec -n 2 ./give_up MOMENTS MEBIBYTES [SEED]
// Rank 0 stops rank 1 (SIGSTOP) somewhere in a call, gets an error, uses its memory for something else and lets rank 1
// go on. No result may be wrong, and nobody may touch memory that was given back. Built with AddressSanitizer and
// UndefinedBehaviorSanitizer by tests/test_sanitizer.py.
#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/error.hpp"
#include "engine/team.hpp"
#include "keras_hpc/engine.h"
#include "mpi/library.hpp"
#include "transport/mpi_transport.hpp"

using namespace keras_hpc;

namespace {

constexpr int kOwn = -7;  // what the program writes where it has got its memory back

int rank, failures = 0, given_up = 0;

void expect(bool right, const std::string& what) {
  if (right) return;
  std::fprintf(stderr, "rank %d: wrong: %s\n", rank, what.c_str());
  ++failures;
}

bool all_are(const float* data, size_t count, float value) {
  return std::all_of(data, data + count, [value](float x) { return x == value; });
}

// One kind of communication on `count` numbers, all of them rank + 1 before it.
void communicate(Team& team, int kind, float* data, size_t count) {
  const auto n = static_cast<int64_t>(count);
  if (kind == 0) return team.allreduce(data, n, DType::float32, Op::sum);
  if (kind == 1) return team.allreduce(data, n, DType::float32, Op::sum, DType::bfloat16);
  if (kind == 2 || kind == 3) {
    const auto plan = team.make_plan("p", {{"a", DType::float32, n / 3}, {"b", DType::float32, n - n / 3}},
                                     {Op::sum, kind == 3, std::nullopt, kind == 3});
    team.start(*plan, 1, data + count / 3, 1.0);
    team.start(*plan, 0, data, 1.0);
    team.wait(*plan, 0);
    team.wait(*plan, 1);
    for (int t = 0; kind == 3 && t < 2; ++t)
      std::memcpy(data + (t == 0 ? 0 : count / 3), plan->memory().get() + plan->layout().range(t).begin,
                  plan->layout().range(t).size());
    return;
  }
  if (kind == 4) {
    team.broadcast(data, count * sizeof(float), 1);
    if (!all_are(data, count, 2)) throw std::runtime_error("a broadcast gave wrong values");
    return std::fill(data, data + count, 3.0F);
  }
  std::vector<float> all(2 * count);
  team.allgather(data, all.data(), {count * sizeof(float), count * sizeof(float)});
  for (size_t i = 0; i < count; ++i) data[i] = all[i] + all[count + i];
}

void moment(const khpc_mpi& world, int number, size_t count, int other, double& usual_seconds) {
  std::mt19937 random(static_cast<unsigned>(number));  // the same on both ranks
  const auto chance = [&] { return std::uniform_real_distribution<double>(0, 1)(random); };
  const int kind = static_cast<int>(random() % 6);
  const std::vector<int> nodes = random() % 2 == 0 ? std::vector<int>{0, 0} : std::vector<int>{0, 1};
  const mpi::Constants constants{world.byte,
                                 world.errors_return,
                                 world.status_ignore,
                                 world.in_place,
                                 {{DType::float32, world.float32}},
                                 {{Op::sum, world.sum}}};
  TeamOptions options;
  options.threads = static_cast<int>(random() % 3);
  options.timeout_seconds = 60;
  options.stall_seconds = 60;
  options.grace_seconds = 0.1;
  auto data = std::make_unique<float[]>(count);
  std::fill(data.get(), data.get() + count, static_cast<float>(rank + 1));
  auto team = std::make_unique<Team>(
      make_mpi_transport(mpi::connect("", world.handle_size, world.comm, constants), nodes), number, options);
  auto& choices = team->allreduce_call().choices();
  choices.add(Choices::Named{"network", 0, SIZE_MAX, random() % 2 == 0 ? "pairwise" : "ring"});
  choices.add(Choices::Named{"private", 0, SIZE_MAX, "staged"});
  team->set_time_limit(rank == 0 ? 0.1 : 0.4);
  MPI_Barrier(MPI_COMM_WORLD);

  const double delay = chance() * usual_seconds;
  std::thread stopper;
  if (rank == 0)
    stopper = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::duration<double>(delay));
      kill(other, SIGSTOP);
    });
  const auto begin = Clock::now();
  bool is_error = false;
  try {
    communicate(*team, kind, data.get(), count);
    expect(all_are(data.get(), count, 3), "kind " + std::to_string(kind) + " on " + std::to_string(nodes[1] + 1) +
                                              " nodes, moment " + std::to_string(number));
  } catch (const Error&) {
    is_error = true;
    ++given_up;
  }
  // So that moments fall into the call, also into its end.
  if (!is_error) usual_seconds = 0.8 * usual_seconds + 0.2 * seconds_since(begin);
  const bool keep = random() % 2 == 0;
  if (is_error && keep) std::fill(data.get(), data.get() + count, static_cast<float>(kOwn));
  if (is_error && !keep) data.reset();
  if (rank == 0) {
    stopper.join();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    kill(other, SIGCONT);
  }
  MPI_Barrier(MPI_COMM_WORLD);  // MPI makes progress here, as in any other call of a program
  if (is_error && keep) expect(all_are(data.get(), count, kOwn), "memory was written after an error");
  team.reset();
  MPI_Barrier(MPI_COMM_WORLD);
  if (is_error && keep) expect(all_are(data.get(), count, kOwn), "memory was written after the team's end");
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0, pids[2];
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const int moments = std::atoi(argv[1]);
  const size_t count = std::strtoul(argv[2], nullptr, 10) << 18;
  const int seed = argc > 3 ? std::atoi(argv[3]) : 0;
  const int me = getpid();
  MPI_Allgather(&me, 1, MPI_INT, pids, 1, MPI_INT, MPI_COMM_WORLD);
  const khpc_mpi world = khpc_mpi_of(MPI_COMM_WORLD);
  double usual_seconds = 0.2;
  try {
    for (int i = 0; i < moments; ++i) {
      moment(world, seed + i, count, pids[1 - rank], usual_seconds);
      if (rank == 0 && i % 50 == 49) std::printf("%d moments, %d given up\n", i + 1, given_up);
      std::fflush(stdout);
    }
  } catch (const std::exception& e) {
    expect(false, e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  std::free(const_cast<int*>(world.node_of_rank));
  if (rank == 0) std::printf("%d moments, %d given up: done\n", moments, given_up);
  std::fflush(stdout);
  MPI_Barrier(MPI_COMM_WORLD);
  _exit(failures == 0 ? 0 : 1);  // operations that were given up may never end: MPI_Finalize would wait for them
}
