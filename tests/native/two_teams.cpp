// Two teams that reduce at the same time, in random order, ranks as threads: what ThreadSanitizer looks at.
// tests/test_sanitizer.py builds it with the engine's sources and runs it.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "common/error.hpp"
#include "engine/team.hpp"
#include "transport/in_process.hpp"

using namespace keras_hpc;

namespace {

std::atomic<int> failures{0};

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  ++failures;
}

// One rank's work on one team. The order of its operations is random but the same on all ranks.
void work(Team& team, int rank, int ranks, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::mt19937 mine(static_cast<unsigned>(1000 * seed + rank));
  const auto weighted_plan =
      team.make_plan("weighted", {{"a", DType::float32, 300000}, {"b", DType::float32, 10}}, {Op::mean, true});
  const auto plain_plan = team.make_plan("plain", {{"c", DType::float64, 5000}}, {Op::sum, false});
  Plan &weighted = *weighted_plan, &plain = *plain_plan;
  std::vector<float> a(300000), b(10);
  std::vector<double> c(5000);
  const std::shared_ptr<Area> area = team.make_area(400000);
  auto* shared = reinterpret_cast<float*>(area->of(team.topology().local_rank));
  const float sum = static_cast<float>(ranks * (ranks + 1)) / 2;
  float weights = 0, average = 0;
  for (int r = 1; r <= ranks; ++r) {
    weights += static_cast<float>(r);
    average += static_cast<float>(r * r);
  }
  average /= weights;
  for (int step = 0; step < 12; ++step) {
    const auto count = static_cast<int64_t>(random() % 100000);
    switch (random() % 3) {
      case 0: {  // both plans, tensors in an order of this rank's own
        std::fill(a.begin(), a.end(), static_cast<float>(rank + 1));
        std::fill(b.begin(), b.end(), static_cast<float>(rank + 1));
        std::fill(c.begin(), c.end(), rank + 1.0);
        const bool swapped = mine() % 2 == 0;
        std::thread helper([&] { team.start(plain, 0, c.data(), 1.0); });
        team.start(weighted, swapped ? 1 : 0, swapped ? b.data() : a.data(), rank + 1.0);
        team.start(weighted, swapped ? 0 : 1, swapped ? a.data() : b.data(), rank + 1.0);
        helper.join();
        std::atomic<int> done{0};
        const auto finished = [](void* flag, const char*) { static_cast<std::atomic<int>*>(flag)->store(1); };
        if (mine() % 2 == 0 && team.wait_all_async(weighted, finished, &done)) {
          while (done == 0) std::this_thread::yield();
        } else {
          team.wait(weighted, 0);
          team.wait(weighted, 1);
        }
        team.wait(plain, 0);
        expect(std::abs(a[299999] - average) < 1e-4f && std::abs(b[9] - average) < 1e-4f, "a weighted mean");
        expect(c[4999] == static_cast<double>(sum), "a sum of a plan");
        break;
      }
      case 1:
        std::fill(a.begin(), a.end(), static_cast<float>(rank + 1));
        team.allreduce(a.data(), count, DType::float32, Op::sum);
        expect(count == 0 || a[static_cast<size_t>(count - 1)] == sum, "a call on a private array");
        break;
      default:
        std::fill(shared, shared + 100000, static_cast<float>(rank + 1));
        team.allreduce(shared + 7, count / 2, DType::float32, Op::sum);
        expect(count < 2 || shared[6 + count / 2] == sum, "a call on a shared array");
        team.barrier();  // before it is rewritten: it is compared above, behind the last element too
    }
  }
}

// Executes a plan until a start says that the team has failed, and uses the memory again at once.
void start_until_told(Team& team, Plan& plan) {
  std::vector<float> data(300000, 1);
  const auto is_told = [&] {
    try {
      team.start(plan, 0, data.data(), 1.0);
    } catch (const Error& e) {
      return std::strstr(e.what(), "started twice") == nullptr;
    }
    return false;
  };
  try {
    while (!is_told())
      if (plan.is_complete(0)) team.wait(plan, 0);
  } catch (const Error&) {  // the wait was first
  }
  data.assign(300000, 2);
}

// Rank 0 gives up, uses its memory again at once, and closes the team while a thread of its own waits for another plan.
void give_up(Team& team, int rank, int late_ms) {
  const auto plan = team.make_plan("plan", {{"a", DType::float32, 100000}}, {Op::sum, false});
  const auto other = team.make_plan("other", {{"b", DType::float32, 1000}}, {Op::sum, false});
  const auto third = team.make_plan("third", {{"c", DType::float32, 300000}}, {Op::sum, false});
  team.barrier();
  team.set_time_limit(rank == 0 ? 0.02 : 0.1);
  std::vector<float> a(100000, 1), b(1000, 1);
  std::thread waiter, starter([&] { start_until_told(team, *third); });
  std::atomic<bool> over{false};
  std::thread looker([&] {  // as Python's watchdog does
    while (!over) {
      team.look_around();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  if (rank == 0) {
    waiter = std::thread([&] {
      try {
        team.start(*other, 0, b.data(), 1.0);
        team.wait(*other, 0);
        expect(false, "nobody else has started this plan");
      } catch (const Error&) {
      }
      b.assign(1000, 2);
    });
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
  }
  try {
    team.start(*plan, 0, a.data(), 1.0);
    team.wait(*plan, 0);
    expect(a[99999] == 2, "a sum beside an error");
  } catch (const Error&) {
  }
  a.assign(100000, 3);
  team.close();
  over = true;
  looker.join();
  starter.join();
  if (rank == 0) waiter.join();
}

}  // namespace

int main() {
  for (const auto& nodes : std::vector<std::vector<int>>{{0, 0}, {0, 0, 0}, {0, 1, 0}})
    for (const int threads : {0, 1, 2}) {
      const int ranks = static_cast<int>(nodes.size());
      auto first = make_in_process_transports(nodes);
      auto second = make_in_process_transports(nodes);
      std::atomic<int> done{0};
      std::vector<std::thread> everyone;
      for (int rank = 0; rank < ranks; ++rank)
        everyone.emplace_back([&, rank] {
          try {
            Team one(std::move(first[static_cast<size_t>(rank)]), 0, {threads, 120, 60});
            Team two(std::move(second[static_cast<size_t>(rank)]), 1, {threads, 120, 60});
            std::thread other([&] { work(two, rank, ranks, 1 + threads); });
            work(one, rank, ranks, 7 + threads);
            other.join();
            ++done;
            while (done < ranks) std::this_thread::yield();  // a team is closed by all ranks together
          } catch (const std::exception& e) {
            expect(false, e.what());
            std::abort();
          }
        });
      for (std::thread& thread : everyone) thread.join();
      std::printf("%d ranks, %d threads for each team: done\n", ranks, threads);
    }
  for (int i = 0; i < 40; ++i) {
    auto transports = make_in_process_transports(i % 2 == 0 ? std::vector<int>{0, 0} : std::vector<int>{0, 1});
    std::vector<std::thread> everyone;
    for (int rank = 0; rank < 2; ++rank)
      everyone.emplace_back([&, rank] {
        TeamOptions options{i % 3, 120, 60};
        options.grace_seconds = 0.05;
        Team team(std::move(transports[static_cast<size_t>(rank)]), 0, options);
        team.allreduce_call().choices().add(Choices::Named{"network", 0, SIZE_MAX, "pairwise"});
        give_up(team, rank, i);
      });
    for (std::thread& thread : everyone) thread.join();
  }
  std::printf("ranks that give up: done\n");
  return failures == 0 ? 0 : 1;
}
