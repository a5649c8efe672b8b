// SPDX-License-Identifier: Apache-2.0
#include "engine/c_api.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "engine/registry.hpp"
#include "keras_hpc/engine.h"
#include "mpi/library.hpp"
#include "transport/mpi_transport.hpp"

namespace keras_hpc {
namespace {

using namespace c_api;

registry::PlanEntry find_pipeline(int plan, int tensor) {
  registry::PlanEntry entry = find(plan, tensor);
  if (entry.pipeline == nullptr) throw Error("Plan '" + entry.plan->name() + "' is not pipelined.");
  return entry;
}

bool has_bytes(const registry::PlanEntry& entry, int tensor) {
  return entry.plan->layout().range(tensor).size() > 0;
}

// Of elements and bytes; so no product of their number and a size is too large for 64 bits.
constexpr int64_t kMost = int64_t{1} << 48;

bool is_size(int64_t number) {
  return number >= 0 && number < kMost;
}

// Throws Error unless it is a size, and so are the factors.
int64_t product(const std::vector<int64_t>& factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    expect(is_size(factor), "lengths >= 0, and not too large");
    expect(product == 0 || factor < kMost / product, "an array that is not too large");
    product *= factor;
  }
  return product;
}

// Teams and arrays that C made, and so owns. Never destroyed: the process may end before it gives them back.
struct Owned {
  std::mutex mutex;
  std::set<int> teams;
  std::map<void*, std::shared_ptr<Area>> areas;
};
Owned& owned = *new Owned;

}  // namespace
}  // namespace keras_hpc

using namespace keras_hpc;
using namespace keras_hpc::c_api;

int khpc_start(int plan, int tensor, void* data, double weight) {
  return guarded(
      [&]() -> int {
        const auto entry = find(plan, tensor);
        expect(data != nullptr || !has_bytes(entry, tensor), "the address of a tensor, not a null pointer");
        expect(std::isfinite(weight) && weight >= 0, "a weight >= 0");
        if (entry.pipeline != nullptr)
          entry.pipeline->start(tensor, data, weight);
        else if (entry.local != nullptr)
          entry.local->start(tensor, data);
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
        else if (entry.local != nullptr)
          entry.local->wait(tensor);
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
        expect(done != nullptr, "a function to call, not a null pointer");
        const bool accepted = entry.pipeline != nullptr ? entry.pipeline->wait_all_async(done, arg)
                              : entry.local != nullptr  ? entry.local->wait_all_async(done, arg)
                                                        : entry.team->wait_all_async(*entry.plan, done, arg);
        return accepted ? KHPC_OK : KHPC_BLOCKING;
      },
      KHPC_ERROR);
}

int khpc_updates(int plan) {
  return guarded(
      [&] {
        const auto entry = find(plan, 0);
        return entry.pipeline != nullptr ? entry.pipeline->updates() : 1;
      },
      -1);
}

int khpc_second(int plan, int tensor, void* data) {
  return guarded(
      [&]() -> int {
        const auto entry = find_pipeline(plan, tensor);
        expect(data != nullptr || !has_bytes(entry, tensor), "the address of a tensor, not a null pointer");
        entry.pipeline->second(tensor, data);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_second_async(int plan, void* const* data, void (*done)(void* arg, const char* error), void* arg) {
  return guarded(
      [&]() -> int {
        const auto entry = find_pipeline(plan, 0);
        expect(data != nullptr && done != nullptr, "addresses of tensors and a function to call, not null pointers");
        const int count = entry.plan->layout().tensor_count();
        return entry.pipeline->second_async({data, data + count}, done, arg) ? KHPC_OK : KHPC_BLOCKING;
      },
      KHPC_ERROR);
}

int khpc_exchange_start(int exchange, int adjoint, const void* data, int64_t outer, int64_t inner, const char* dtype) {
  return guarded(
      [&]() -> int {
        const auto entry = registry::exchange(exchange);
        const ExchangeSpec& spec = entry.team->exchange(entry.number);
        const bool empty = product({outer, inner, adjoint != 0 ? spec.rows() : spec.extent}) == 0;
        expect(data != nullptr || empty, "the address of a tensor, not a null pointer");
        entry.team->start_exchange(entry.number, {outer, inner, parse_dtype(text(dtype, "dtype")), adjoint != 0}, data);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_exchange_wait(int exchange, int adjoint, void* result) {
  return guarded(
      [&]() -> int {
        const auto entry = registry::exchange(exchange);
        entry.team->wait_exchange(entry.number, adjoint != 0, result);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int64_t khpc_exchange_rows(int exchange) {
  return guarded(
      [&]() -> int64_t {
        const auto entry = registry::exchange(exchange);
        return entry.team->exchange(entry.number).extent;
      },
      int64_t{-1});
}

int64_t khpc_exchange_cells(int exchange) {
  return guarded(
      [&]() -> int64_t {
        const auto entry = registry::exchange(exchange);
        const ExchangeSpec& spec = entry.team->exchange(entry.number);
        return spec.left + spec.right;
      },
      int64_t{-1});
}

int64_t khpc_exchange_window(int exchange) {
  return guarded(
      [&]() -> int64_t {
        const auto entry = registry::exchange(exchange);
        return entry.team->exchange(entry.number).rows();
      },
      int64_t{-1});
}

int khpc_plan_tensors(int plan) {
  return guarded([&] { return find(plan, 0).plan->layout().tensor_count(); }, -1);
}

int64_t khpc_plan_nbytes(int plan, int tensor) {
  return guarded(
      [&]() -> int64_t { return static_cast<int64_t>(find(plan, tensor).plan->layout().range(tensor).size()); },
      int64_t{-1});
}

int khpc_plan_only_reads(int plan, int tensor) {
  return guarded([&] { return find(plan, tensor).plan->only_reads(tensor) ? 1 : 0; }, -1);
}

int khpc_allgather_counts(int team, int64_t mine, int64_t* counts) {
  return guarded(
      [&]() -> int {
        expect(counts != nullptr, "memory for the counts, not a null pointer");
        const std::vector<int64_t> all = registry::team(team)->allgather_count(mine);
        std::copy(all.begin(), all.end(), counts);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_allgatherv(int team, const void* in, int64_t nbytes, void* out, const int64_t* nbytes_by_rank) {
  return guarded(
      [&]() -> int {
        const auto t = registry::team(team);
        expect(nbytes_by_rank != nullptr, "the numbers of bytes, not a null pointer");
        const std::vector<int64_t> given(nbytes_by_rank, nbytes_by_rank + t->topology().size);
        int64_t total = 0;
        for (const int64_t count : given) {
          expect(is_size(count), "numbers of bytes >= 0");
          total += count;
        }
        expect(given[static_cast<size_t>(t->topology().rank)] == nbytes, "nbytes to be this rank's of nbytes_by_rank");
        expect((in != nullptr || nbytes == 0) && (out != nullptr || total == 0), "memory, not null pointers");
        t->allgather(in, out, {given.begin(), given.end()});
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_allreduce_tensor(int team, void* data, const int64_t* shape, int rank, const char* dtype, const char* op,
                          const char* what) {
  return guarded(
      [&]() -> int {
        expect(rank >= 0 && (shape != nullptr || rank == 0), "a shape");
        const std::vector<int64_t> lengths(shape, shape + rank);
        const int64_t count = product(lengths);
        expect(data != nullptr || count == 0, "the address of an array, not a null pointer");
        registry::team(team)->allreduce(data, count, parse_dtype(text(dtype, "dtype")), parse_op(text(op, "op")),
                                        std::nullopt, std::nullopt, text(what, "what"), lengths);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_team_size(int team) {
  return guarded([&] { return registry::team(team)->topology().size; }, -1);
}

int khpc_team_create(const khpc_mpi* mpi, int threads, double timeout_seconds) {
  return guarded(
      [&]() -> int {
        expect(mpi != nullptr && mpi->size > 0 && mpi->node_of_rank != nullptr, "what khpc_mpi_of has filled in");
        expect(mpi->thread_level >= mpi->thread_multiple, "MPI to be initialized with MPI_THREAD_MULTIPLE");
        expect(threads >= 0 && threads <= 64, "0 to 64 threads");
        expect(timeout_seconds > 0, "a time limit > 0 seconds");
        const mpi::Constants constants{mpi->byte,
                                       mpi->errors_return,
                                       mpi->status_ignore,
                                       mpi->in_place,
                                       {{DType::float32, mpi->float32},
                                        {DType::float64, mpi->float64},
                                        {DType::int32, mpi->int32},
                                        {DType::int64, mpi->int64}},
                                       {{Op::sum, mpi->sum}}};
        // The functions of MPI are those that the program itself is linked to.
        auto communicator = mpi::connect("", mpi->handle_size, mpi->comm, constants);
        const std::vector<int> nodes =
            nodes_that_share_memory(*communicator, {mpi->node_of_rank, mpi->node_of_rank + mpi->size});
        static std::atomic<int> number{0};
        // Not under the lock: another thread may make one, of other ranks, at the same time.
        const auto team = std::make_shared<Team>(make_mpi_transport(std::move(communicator), nodes), number++,
                                                 TeamOptions{threads, timeout_seconds, timeout_seconds, std::nullopt});
        const int id = registry::add(team);
        const std::lock_guard lock(owned.mutex);
        owned.teams.insert(id);
        return id;
      },
      -1);
}

int khpc_team_free(int team) {
  return guarded(
      [&]() -> int {
        {
          const std::lock_guard lock(owned.mutex);
          if (owned.teams.count(team) == 0) throw Error("khpc_team_free: not a team of khpc_team_create.");
        }
        registry::close(registry::team(team));
        const std::lock_guard lock(owned.mutex);
        owned.teams.erase(team);
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_allreduce(int team, void* data, int64_t count, const char* dtype, const char* op) {
  return guarded(
      [&]() -> int {
        expect(is_size(count) && (data != nullptr || count == 0), "an array of >= 0 elements");
        registry::team(team)->allreduce(data, count, parse_dtype(text(dtype, "dtype")), parse_op(text(op, "op")));
        return KHPC_OK;
      },
      KHPC_ERROR);
}

void* khpc_empty(int team, int64_t nbytes) {
  return guarded(
      [&]() -> void* {
        const auto t = registry::team(team);
        expect(is_size(nbytes), "a number of bytes >= 0");
        // Where a rank's array begins depends on it.
        t->agree("khpc_empty", {std::to_string(nbytes) + " bytes"});
        auto area = t->make_area(static_cast<size_t>(nbytes));
        void* data = area->of(t->topology().local_rank);
        const std::lock_guard lock(owned.mutex);
        owned.areas[data] = std::move(area);
        return data;
      },
      nullptr);
}

int khpc_empty_free(void* data) {
  return guarded(
      [&]() -> int {
        const std::lock_guard lock(owned.mutex);
        if (owned.areas.erase(data) == 0) throw Error("khpc_empty_free: not memory of khpc_empty.");
        return KHPC_OK;
      },
      KHPC_ERROR);
}

int khpc_plan_create(int team, const char* name, int count, const char* const* tensors, const char* const* dtypes,
                     const int64_t* elements, const char* op, int weighted) {
  return guarded(
      [&]() -> int {
        expect(count > 0 && tensors != nullptr && dtypes != nullptr && elements != nullptr, "one tensor or more");
        std::vector<TensorSpec> specs;
        for (int i = 0; i < count; ++i) {
          expect(is_size(elements[i]), "numbers of elements >= 0");
          specs.push_back({text(tensors[i], "a tensor's name"), parse_dtype(text(dtypes[i], "a dtype")), elements[i]});
        }
        const auto t = registry::team(team);
        return registry::add(t, t->make_plan(text(name, "name"), specs, {parse_op(text(op, "op")), weighted != 0}));
      },
      -1);
}

const char* khpc_last_error(void) {
  return last_error.c_str();
}
