// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "engine/registry.hpp"
#include "keras_hpc/engine.h"
#include "mpi/library.hpp"
#include "transport/mpi_transport.hpp"

namespace keras_hpc {
namespace {

thread_local std::string last_error;

// No exception leaves the C interface.
template <class F>
auto guarded(F&& f, decltype(f()) on_error) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& e) {
    last_error = e.what();
    return on_error;
  }
}

registry::PlanEntry find(int plan, int tensor) {
  const registry::PlanEntry entry = registry::plan(plan);
  if (tensor < 0 || tensor >= entry.plan->layout().tensor_count())
    throw Error("Plan '" + entry.plan->name() + "' has no tensor number " + std::to_string(tensor) + ".");
  return entry;
}

Pipeline& pipeline_of(int plan, int tensor) {
  const registry::PlanEntry entry = find(plan, tensor);
  if (entry.pipeline == nullptr) throw Error("Plan '" + entry.plan->name() + "' is not pipelined.");
  return *entry.pipeline;
}

// Teams and arrays that C made, and so owns.
std::mutex owned_mutex;
std::map<int, std::unique_ptr<Team>> owned_teams;
std::map<void*, std::shared_ptr<Area>> owned_areas;

}  // namespace
}  // namespace keras_hpc

using namespace keras_hpc;

int khpc_start(int plan, int tensor, void* data, double weight) {
  return guarded(
      [&]() -> int {
        const auto entry = find(plan, tensor);
        if (entry.pipeline != nullptr)
          entry.pipeline->start(tensor, data, weight);
        else
          entry.team->start(*entry.plan, tensor, data, weight);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_wait(int plan, int tensor) {
  return guarded(
      [&]() -> int {
        const auto entry = find(plan, tensor);
        if (entry.pipeline != nullptr)
          entry.pipeline->wait(tensor);
        else
          entry.team->wait(*entry.plan, tensor);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_wait_all_async(int plan, void (*done)(void* arg, const char* error), void* arg) {
  return guarded(
      [&]() -> int {
        const auto entry = find(plan, 0);
        const bool accepted = entry.pipeline != nullptr ? entry.pipeline->wait_all_async(done, arg)
                                                        : entry.team->wait_all_async(*entry.plan, done, arg);
        return accepted ? KHPC_OK : KHPC_BLOCKING;
      },
      KHPC_ERROR);
}

int khpc_updates(int plan) {
  return guarded(
      [&] {
        const Pipeline* pipeline = find(plan, 0).pipeline;
        return pipeline != nullptr ? pipeline->updates() : 1;
      },
      -1);
}

int khpc_second(int plan, int tensor, void* data) {
  return guarded(
      [&]() -> int {
        pipeline_of(plan, tensor).second(tensor, data);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_second_async(int plan, void* const* data, void (*done)(void* arg, const char* error), void* arg) {
  return guarded(
      [&]() -> int {
        const int count = find(plan, 0).plan->layout().tensor_count();
        return pipeline_of(plan, 0).second_async({data, data + count}, done, arg) ? KHPC_OK : KHPC_BLOCKING;
      },
      KHPC_ERROR);
}

int khpc_plan_tensors(int plan) {
  return guarded([&] { return find(plan, 0).plan->layout().tensor_count(); }, -1);
}

int64_t khpc_plan_nbytes(int plan, int tensor) {
  return guarded(
      [&]() -> int64_t { return static_cast<int64_t>(find(plan, tensor).plan->layout().range(tensor).size()); },
      int64_t{-1});
}

int khpc_allgather_counts(int team, int64_t mine, int64_t* counts) {
  return guarded(
      [&]() -> int {
        const std::vector<int64_t> all = registry::team(team).allgather_count(mine);
        std::copy(all.begin(), all.end(), counts);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_allgatherv(int team, const void* in, int64_t nbytes, void* out, const int64_t* nbytes_by_rank) {
  return guarded(
      [&]() -> int {
        Team& t = registry::team(team);
        const std::vector<size_t> counts(nbytes_by_rank, nbytes_by_rank + t.topology().size);
        if (static_cast<int64_t>(counts[static_cast<size_t>(t.topology().rank)]) != nbytes)
          throw Error("khpc_allgatherv: nbytes is not this rank's entry of nbytes_by_rank.");
        t.allgather(in, out, counts);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_allreduce_tensor(int team, void* data, const int64_t* shape, int rank, const char* dtype, const char* op,
                          const char* what) {
  return guarded(
      [&]() -> int {
        const std::vector<int64_t> lengths(shape, shape + rank);
        const int64_t count = std::accumulate(lengths.begin(), lengths.end(), int64_t{1}, std::multiplies<>());
        registry::team(team).allreduce(data, count, parse_dtype(dtype), parse_op(op), std::nullopt, std::nullopt, what,
                                       lengths);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_team_size(int team) {
  return guarded([&] { return registry::team(team).topology().size; }, -1);
}

int khpc_team_create(const khpc_mpi* mpi, int threads, double timeout_seconds) {
  return guarded(
      [&]() -> int {
        const mpi::Constants constants{mpi->byte,
                                       mpi->errors_return,
                                       mpi->status_ignore,
                                       mpi->in_place,
                                       {{DType::float32, mpi->float32},
                                        {DType::float64, mpi->float64},
                                        {DType::int32, mpi->int32},
                                        {DType::int64, mpi->int64}},
                                       {{Op::sum, mpi->sum}}};
        const std::vector<int> nodes(mpi->node_of_rank, mpi->node_of_rank + mpi->size);
        // The functions of MPI are those that the program itself is linked to.
        auto transport = make_mpi_transport(mpi::connect("", mpi->handle_size, mpi->comm, constants), nodes);
        const std::lock_guard lock(owned_mutex);
        auto team = std::make_unique<Team>(std::move(transport), static_cast<int>(owned_teams.size()),
                                           TeamOptions{threads, timeout_seconds, timeout_seconds, std::nullopt});
        const int id = registry::add(team.get());
        owned_teams[id] = std::move(team);
        return id;
      },
      -1);
}

int khpc_team_free(int team) {
  return guarded(
      [&]() -> int {
        const std::lock_guard lock(owned_mutex);
        if (owned_teams.count(team) == 0) throw Error("khpc_team_free: not a team of khpc_team_create.");
        registry::remove(owned_teams[team].get());
        owned_teams.erase(team);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_allreduce(int team, void* data, int64_t count, const char* dtype, const char* op) {
  return guarded(
      [&]() -> int {
        registry::team(team).allreduce(data, count, parse_dtype(dtype), parse_op(op));
        return KHPC_OK;
      },
      KHPC_ERROR);
}

void* khpc_empty(int team, int64_t nbytes) {
  return guarded(
      [&]() -> void* {
        Team& t = registry::team(team);
        auto area = t.allreduce_call().make_area(static_cast<size_t>(nbytes));
        void* data = area->of(t.topology().local_rank);
        const std::lock_guard lock(owned_mutex);
        owned_areas[data] = std::move(area);
        return data;
      },
      nullptr);
}

int khpc_empty_free(void* data) {
  return guarded(
      [&]() -> int {
        const std::lock_guard lock(owned_mutex);
        if (owned_areas.erase(data) == 0) throw Error("khpc_empty_free: not memory of khpc_empty.");
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_plan_create(int team, const char* name, int count, const char* const* tensors, const char* const* dtypes,
                     const int64_t* elements, const char* op, int weighted) {
  return guarded(
      [&]() -> int {
        std::vector<TensorSpec> specs;
        for (int i = 0; i < count; ++i) specs.push_back({tensors[i], parse_dtype(dtypes[i]), elements[i]});
        Team& t = registry::team(team);
        return registry::add(&t, &t.make_plan(name, specs, parse_op(op), weighted != 0));
      },
      -1);
}

const char* khpc_last_error(void) {
  return last_error.c_str();
}
