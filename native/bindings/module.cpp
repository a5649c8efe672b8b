// SPDX-License-Identifier: Apache-2.0
// Conversions between Python and the engine; no algorithm.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "engine/registry.hpp"
#include "engine/stopwatch.hpp"
#include "engine/team.hpp"
#include "engine/trace.hpp"
#include "mpi/library.hpp"
#include "transport/in_process.hpp"
#include "transport/mpi_transport.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace keras_hpc;

namespace {

// Memory of any dtype as bytes: NumPy has dtypes (bfloat16) that buffers cannot name, so the dtype comes beside it.
// .noconvert() on every argument of this type: otherwise an operation in place would work on a temporary copy.
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A team and its numbers for the frameworks' operations.
class PyTeam {
 public:
  PyTeam(std::unique_ptr<Transport> transport, int number, int threads, double timeout_seconds, double stall_seconds,
         const std::string& waiting)
      : team_(std::make_unique<Team>(
            std::move(transport), number,
            TeamOptions{threads, timeout_seconds, stall_seconds,
                        waiting == "auto" ? std::nullopt : std::optional(parse_patience(waiting))})),
        id_(registry::add(team_.get())) {}
  ~PyTeam() { close(); }

  Team& get() const {
    if (!team_) throw Error("This team is closed: keras_hpc.finalize() was called.");
    return *team_;
  }
  int id() const { return id_; }
  void close() {
    std::unique_ptr<Team> team;
    {
      const std::lock_guard lock(closing_);
      team = std::move(team_);
    }
    if (team) registry::remove(team.get());
  }
  // Calls `f` with the team unless it is closed, and not while it is being closed.
  template <class F>
  void if_open(F&& f) const {
    const std::lock_guard lock(closing_);
    if (team_) f(*team_);
  }

 private:
  mutable std::mutex closing_;
  std::unique_ptr<Team> team_;
  int id_;
};

struct PyPlan {
  const PyTeam* owner;  // kept alive by Python
  Plan* plan;           // valid while the owner is open; null: it has ended
  Pipeline* pipeline;   // null: steps are synchronous
  int id;

  Team& team() const { return owner->get(); }

  Pipeline& get_pipeline() const {
    static_cast<void>(team());
    if (plan == nullptr) throw Error("The plan has ended.");
    if (pipeline == nullptr) throw Error("Plan '" + plan->name() + "' is not pipelined.");
    return *pipeline;
  }

  void check(int tensor, size_t nbytes) const {
    if (plan == nullptr) throw Error("The plan has ended.");
    if (tensor < 0 || tensor >= plan->layout().tensor_count())
      throw nb::index_error(("The plan has no tensor number " + std::to_string(tensor)).c_str());
    if (nbytes != plan->layout().range(tensor).size())
      throw nb::value_error(("Tensor '" + plan->tensors()[static_cast<size_t>(tensor)].name + "' has " +
                             std::to_string(plan->layout().range(tensor).size()) +
                             " bytes in the plan. Received: " + std::to_string(nbytes))
                                .c_str());
  }
};

std::optional<DType> parse_wire(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const DType wire = parse_dtype(name);
  if (wire != DType::float16 && wire != DType::bfloat16)
    throw nb::value_error("Values are sent as they are, or as float16 or bfloat16.");
  return wire;
}

using Spec = std::tuple<std::string, std::string, int64_t>;

PyPlan make_plan(const PyTeam& team, const std::string& name, const std::vector<Spec>& tensors, const std::string& op,
                 bool weighted, const std::string& wire, bool in_segment, bool pipelined) {
  std::vector<TensorSpec> specs;
  for (const auto& [tensor, dtype, count] : tensors) specs.push_back({tensor, parse_dtype(dtype), count});
  Plan& plan = team.get().make_plan(name, specs, parse_op(op), weighted, parse_wire(wire), in_segment || pipelined);
  Pipeline* pipeline = pipelined ? &team.get().make_pipeline(plan) : nullptr;
  return {&team, &plan, pipeline, registry::add(&team.get(), &plan, pipeline)};
}

void allreduce(const PyTeam& team, const Bytes& data, const std::string& dtype, const std::string& op,
               const std::string& path, const std::string& wire, const std::string& what,
               const std::vector<int64_t>& shape) {
  const DType type = parse_dtype(dtype);
  team.get().allreduce(data.data(), static_cast<int64_t>(data.size() / size_of(type)), type, parse_op(op),
                       parse_wire(wire), path.empty() ? std::nullopt : std::optional(parse_path(path)), what, shape);
}

void allgather(const PyTeam& team, const ConstBytes& in, const Bytes& out, const std::vector<int64_t>& counts) {
  size_t total = 0;
  for (const int64_t count : counts) total += static_cast<size_t>(count);
  if (counts.size() != static_cast<size_t>(team.get().topology().size) || total != out.size())
    throw nb::value_error("allgather: the counts do not match the ranks or the size of `out`.");
  team.get().allgather(in.data(), out.data(), std::vector<size_t>(counts.begin(), counts.end()));
}

void alltoall(const PyTeam& team, const ConstBytes& in, const std::vector<size_t>& to, const Bytes& out,
              const std::vector<size_t>& from) {
  const auto size = static_cast<size_t>(team.get().topology().size);
  if (to.size() != size || from.size() != size || std::accumulate(to.begin(), to.end(), size_t{0}) != in.size() ||
      std::accumulate(from.begin(), from.end(), size_t{0}) != out.size())
    throw nb::value_error("alltoall: the counts do not match the ranks or the sizes of the arrays.");
  team.get().alltoall(in.data(), to, out.data(), from);
}

nb::dict report(const PyTeam& team) {
  const TeamReport r = team.get().report();
  nb::dict d;
  d["steps"] = r.steps;
  d["bytes"] = r.bytes;
  d["plan_bytes"] = r.plan_bytes;
  d["segment_bytes"] = r.segment_bytes;
  d["wire_seconds"] = r.wire_seconds;
  d["algorithm"] = r.algorithm;
  d["exposed_seconds"] = r.exposed_seconds;
  d["progress_seconds"] = r.progress_seconds;
  return d;
}

// For the watchdog, whose thread may come while the team is being closed.
using Waited = std::tuple<std::string, uint64_t, std::string, int, double, std::vector<int>>;
Waited waited(const Stall& s) {
  return {s.what, s.number, s.detail, s.tensor, seconds_since(s.since), s.missing ? s.missing() : std::vector<int>()};
}

std::vector<Waited> stalls(const PyTeam& team) {
  std::vector<Waited> rows;
  team.if_open([&](Team& open) { open.activity().for_each_stall([&](const Stall& s) { rows.push_back(waited(s)); }); });
  return rows;
}

std::vector<Waited> take_resolved(const PyTeam& team) {
  std::vector<Waited> rows;
  team.if_open([&](Team& open) {
    for (const Stall& s : open.activity().take_resolved()) rows.push_back(waited(s));
  });
  return rows;
}

std::map<std::string, std::tuple<uint64_t, std::vector<int>>> progress(const PyTeam& team) {
  std::map<std::string, std::tuple<uint64_t, std::vector<int>>> reached;
  team.if_open([&](Team& open) {
    for (const PlanProgress& plan : open.progress_of_plans()) reached[plan.what] = {plan.step, plan.not_started};
    reached["allreduce"] = {open.activity().calls, {}};
    reached["collective"] = {open.activity().collectives, {}};
  });
  return reached;
}

nb::list take_trace() {
  nb::list events;
  for (const trace::Event& e : trace::take()) events.append(nb::make_tuple(e.name, e.kind, e.team, e.begin, e.end));
  return events;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The engine of keras_hpc. Use keras_hpc, not this module.";
  // PyTorch's compiler keeps what a step has seen until after this module is gone.
  nb::set_leak_warnings(false);
  const auto release = nb::call_guard<nb::gil_scoped_release>();

  auto error = nb::exception<Error>(m, "Error", PyExc_RuntimeError);
  nb::exception<PlanMismatch>(m, "PlanMismatchError", error);
  nb::exception<Timeout>(m, "TimeoutError", error);

  nb::class_<Transport>(m, "Transport");
  m.def(
      "mpi_transport",
      [](const std::string& module_path, int handle_size, intptr_t comm,
         const std::map<std::string, intptr_t>& constants, const std::map<std::string, intptr_t>& dtypes,
         const std::map<std::string, intptr_t>& ops, const std::vector<int>& node_of_rank) {
        mpi::Constants c{constants.at("BYTE"),
                         constants.at("ERRORS_RETURN"),
                         constants.at("STATUS_IGNORE"),
                         constants.at("IN_PLACE"),
                         {},
                         {}};
        for (const auto& [name, handle] : dtypes) c.dtypes[parse_dtype(name)] = handle;
        for (const auto& [name, handle] : ops) c.ops[parse_op(name)] = handle;
        return make_mpi_transport(mpi::connect(module_path, handle_size, comm, c), node_of_rank);
      },
      "module_path"_a, "handle_size"_a, "comm"_a, "constants"_a, "dtypes"_a, "ops"_a, "node_of_rank"_a,
      "Collective: a transport over the MPI library that mpi4py has loaded.");
  m.def(
      "in_process_transports",
      [](const std::vector<int>& node_of_rank) {
        nb::list transports;
        for (auto& transport : make_in_process_transports(node_of_rank))
          transports.append(nb::cast(std::move(transport)));
        return transports;
      },
      "node_of_rank"_a, "One transport per rank; ranks are threads of this process.");

  nb::class_<PyPlan>(m, "Plan")
      .def_ro("id", &PyPlan::id)
      .def(
          "start",
          [](const PyPlan& plan, int tensor, const Bytes& data, double weight) {
            Team& team = plan.team();
            plan.check(tensor, data.size());
            const nb::gil_scoped_release released;
            if (plan.pipeline != nullptr)
              plan.pipeline->start(tensor, data.data(), weight);
            else
              team.start(*plan.plan, tensor, data.data(), weight);
          },
          "tensor"_a, "data"_a.noconvert(), "weight"_a = 1.0)
      .def(
          "wait",
          [](const PyPlan& plan, int tensor) {
            Team& team = plan.team();
            plan.check(tensor, plan.plan->layout().range(tensor).size());
            const nb::gil_scoped_release released;
            if (plan.pipeline != nullptr)
              plan.pipeline->wait(tensor);
            else
              team.wait(*plan.plan, tensor);
          },
          "tensor"_a)
      .def(
          "memory",
          [](const PyPlan& plan, int tensor) {
            plan.check(tensor, plan.plan->layout().range(tensor).size());
            const Range& range = plan.plan->layout().range(tensor);
            auto* kept = new std::shared_ptr<std::byte>(plan.plan->memory());
            const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<std::byte>*>(p); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(kept->get() + range.begin, {range.size()}, owner);
          },
          "tensor"_a, "The bytes of a tensor that lives in the plan's segment.")
      .def(
          "set_schedule",
          [](const PyPlan& plan, uint64_t synchronous, uint64_t pipelined) {
            plan.get_pipeline().set_schedule(synchronous, pipelined);
          },
          "synchronous"_a, "pipelined"_a, "How many steps from now are synchronous, and then pipelined.")
      .def(
          "end",
          [](PyPlan& plan) {
            registry::remove(plan.plan);
            plan.team().end_plan(*plan.plan);
            plan.plan = nullptr;
            plan.pipeline = nullptr;
          },
          "Frees the plan. On every rank, between steps.")
      .def("updates", [](const PyPlan& plan) { return plan.get_pipeline().updates(); })
      .def(
          "second",
          [](const PyPlan& plan, int tensor, const Bytes& data) {
            plan.check(tensor, data.size());
            const nb::gil_scoped_release released;
            plan.get_pipeline().second(tensor, data.data());
          },
          "tensor"_a, "data"_a.noconvert())
      .def("outstanding", [](const PyPlan& plan) { return plan.get_pipeline().outstanding(); })
      .def(
          "take",
          [](const PyPlan& plan, const std::vector<Bytes>& out, bool keep) {
            std::vector<void*> data;
            for (size_t i = 0; i < out.size(); ++i) {
              plan.check(static_cast<int>(i), out[i].size());
              data.push_back(out[i].data());
            }
            if (data.size() != plan.plan->tensors().size())
              throw nb::value_error("Expected an array for each tensor of the plan.");
            const nb::gil_scoped_release released;
            return plan.get_pipeline().take(data, keep);
          },
          "out"_a, "keep"_a, "The outstanding average, into arrays; False if there is none.")
      .def(
          "put",
          [](const PyPlan& plan, const std::vector<ConstBytes>& arrays) {
            std::vector<const void*> data;
            for (size_t i = 0; i < arrays.size(); ++i) {
              plan.check(static_cast<int>(i), arrays[i].size());
              data.push_back(arrays[i].data());
            }
            if (data.size() != plan.plan->tensors().size())
              throw nb::value_error("Expected an array for each tensor of the plan.");
            plan.get_pipeline().put(data);
          },
          "arrays"_a, "Makes an average outstanding that an earlier process took.");

  nb::class_<PyTeam>(m, "Team")
      .def(nb::init<std::unique_ptr<Transport>, int, int, double, double, const std::string&>(), release, "transport"_a,
           "number"_a, "threads"_a, "timeout_seconds"_a, "stall_seconds"_a, "waiting"_a = "auto", "Collective.")
      .def_prop_ro("id", &PyTeam::id)
      .def_prop_ro("rank", [](const PyTeam& team) { return team.get().topology().rank; })
      .def_prop_ro("size", [](const PyTeam& team) { return team.get().topology().size; })
      .def_prop_ro("node_count", [](const PyTeam& team) { return team.get().topology().node_count; })
      .def_prop_ro("threads", [](const PyTeam& team) { return team.get().threads(); })
      .def("plan", &make_plan, release, "name"_a, "tensors"_a, "op"_a, "weighted"_a, "wire_dtype"_a = "",
           "in_segment"_a = false, "pipelined"_a = false, nb::keep_alive<0, 1>(),
           "Collective: a plan for tensors (name, dtype, count).")
      .def("allreduce", &allreduce, release, "data"_a.noconvert(), "dtype"_a, "op"_a, "path"_a = "",
           "wire_dtype"_a = "", "what"_a = "", "shape"_a = std::vector<int64_t>())
      .def(
          "broadcast",
          [](const PyTeam& team, const Bytes& data, int root) { team.get().broadcast(data.data(), data.size(), root); },
          release, "data"_a.noconvert(), "root"_a)
      .def("allgather", &allgather, release, "data"_a.noconvert(), "out"_a.noconvert(), "nbytes_by_rank"_a)
      .def("alltoall", &alltoall, release, "data"_a.noconvert(), "to"_a, "out"_a.noconvert(), "received"_a)
      .def(
          "allgather_count", [](const PyTeam& team, int64_t mine) { return team.get().allgather_count(mine); }, release,
          "mine"_a)
      .def(
          "barrier", [](const PyTeam& team) { team.get().barrier(); }, release)
      .def(
          "agree",
          [](const PyTeam& team, const std::string& what, const std::vector<std::string>& items) {
            team.get().agree(what, items);
          },
          release, "what"_a, "items"_a)
      .def(
          "add_choice",
          [](const PyTeam& team, const std::string& place, size_t from, size_t to, const std::string& way) {
            team.get().allreduce_call().choices().add(Choices::Named{place, from, to, way});
          },
          "place"_a, "begin"_a, "end"_a, "way"_a)
      .def("choices",
           [](const PyTeam& team) {
             nb::list rows;
             for (const auto& c : team.get().allreduce_call().choices().all())
               rows.append(nb::make_tuple(c.place, c.from, c.to, c.way));
             return rows;
           })
      .def(
          "empty",
          [](const PyTeam& team, int64_t nbytes) {
            std::shared_ptr<Area> area;
            {
              const nb::gil_scoped_release released;
              area = team.get().allreduce_call().make_area(static_cast<size_t>(nbytes));
            }
            auto* kept = new std::shared_ptr<Area>(area);
            const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<Area>*>(p); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(area->of(team.get().topology().local_rank),
                                                                {static_cast<size_t>(nbytes)}, owner);
          },
          "nbytes"_a, "Collective: bytes that the ranks of the node can reach directly.")
      .def("leave", [](const PyTeam& team) { team.get().leave(); })
      .def("report", &report)
      .def("stalls", &stalls, release,
           "Waits longer than stall_seconds: (what, number, detail, tensor, seconds, ranks awaited as seen here).")
      .def("take_resolved", &take_resolved, release, "Those that came to a good end since the last call.")
      .def("progress", &progress, release,
           "For each kind of wait the last number begun, and the tensors not started in it.")
      .def("close", &PyTeam::close, release, "Collective.");

  nb::class_<Stopwatch>(m, "Stopwatch")
      .def(
          "__init__",
          [](Stopwatch* self, const PyTeam& team, size_t nbytes, int tensors, const std::string& wire) {
            new (self) Stopwatch(team.get(), nbytes, tensors, parse_wire(wire));
          },
          release, "team"_a, "nbytes"_a, "tensors"_a, "wire_dtype"_a = "", nb::keep_alive<1, 2>(), "Collective.")
      .def("can", &Stopwatch::can, "way"_a)
      .def("chosen", &Stopwatch::chosen, "way"_a)
      .def("verify", &Stopwatch::verify, release, "way"_a)
      .def("time", &Stopwatch::time, release, "way"_a, "repeats"_a, "batch"_a = 1);

  m.def("set_tracing", [](bool enabled) { trace::enabled = enabled; }, "enabled"_a);
  m.def("take_trace", &take_trace, "Events (name, kind, team, begin, end) since the last call; seconds.");
}
