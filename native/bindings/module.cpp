// SPDX-License-Identifier: Apache-2.0
// Conversions between Python and the engine; no algorithm.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "common/control_group.hpp"
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
      : team_(std::make_shared<Team>(
            std::move(transport), number,
            TeamOptions{threads, timeout_seconds, stall_seconds,
                        waiting == "auto" ? std::nullopt : std::optional(parse_patience(waiting))})),
        id_(registry::add(team_)) {}
  ~PyTeam() {
    const nb::gil_scoped_release released;  // other threads that use it need it to get out
    close();
  }

  // Holds it for as long as the caller works with it: another thread may close it.
  std::shared_ptr<Team> get() const {
    if (!is_of_this_process()) throw Error("This process was forked from a rank and is none itself: it has no team.");
    const std::lock_guard lock(closing_);
    if (!team_) throw Error("This team is closed: keras_hpc.finalize() was called.");
    return team_;
  }
  int id() const { return id_; }
  void close() {
    if (!is_of_this_process()) {  // it is the parent's, whose threads are not here
      new std::shared_ptr<Team>(std::move(team_));
      return;
    }
    std::shared_ptr<Team> team;
    {
      const std::lock_guard lock(closing_);
      team = std::move(team_);
    }
    if (team) registry::close(std::move(team));
  }
  // Calls `f` with the team unless it is closed.
  template <class F>
  void if_open(F&& f) const {
    if (!is_of_this_process()) return;
    std::shared_ptr<Team> team;
    {
      const std::lock_guard lock(closing_);
      team = team_;
    }
    if (team) f(*team);
  }

 private:
  bool is_of_this_process() const { return fork_depth() == fork_depth_; }

  const int fork_depth_ = fork_depth();
  mutable std::mutex closing_;
  std::shared_ptr<Team> team_;
  int id_;
};

// A plan of a team that is open, for the time of a call.
struct OpenPlan {
  std::shared_ptr<Team> team;
  std::shared_ptr<Plan> plan;
  std::shared_ptr<Pipeline> of_pipeline;  // null: steps are synchronous

  void start(int tensor, void* data, double weight) const {
    const nb::gil_scoped_release released;
    if (of_pipeline != nullptr)
      of_pipeline->start(tensor, data, weight);
    else
      team->start(*plan, tensor, data, weight);
  }
  void wait(int tensor) const {
    if (of_pipeline != nullptr)
      of_pipeline->wait(tensor);
    else
      team->wait(*plan, tensor);
  }
  Pipeline& pipeline() const {
    if (of_pipeline == nullptr) throw Error("Plan '" + plan->name() + "' is not pipelined.");
    return *of_pipeline;
  }
  void check(int tensor) const {
    if (tensor < 0 || tensor >= plan->layout().tensor_count())
      throw nb::index_error(("The plan has no tensor number " + std::to_string(tensor)).c_str());
  }
  void check(int tensor, size_t nbytes) const {
    check(tensor);
    if (nbytes != plan->layout().range(tensor).size())
      throw nb::value_error(("Tensor '" + plan->tensors()[static_cast<size_t>(tensor)].name + "' has " +
                             std::to_string(plan->layout().range(tensor).size()) +
                             " bytes in the plan. Received: " + std::to_string(nbytes))
                                .c_str());
  }
};

struct PyPlan {
  const PyTeam* owner;  // kept alive by Python
  // The team's: they end with it, or before.
  std::weak_ptr<Plan> plan;
  std::weak_ptr<Pipeline> pipeline;
  int id;

  OpenPlan open() const {
    OpenPlan all{owner->get(), plan.lock(), pipeline.lock()};
    if (all.plan == nullptr) throw Error("The plan has ended.");
    return all;
  }
};

// Lets other threads of Python run while this one waits. Ctrl-C ends a wait of the main thread, within about a second:
// the wait ends with Interrupted, and Python raises what its handler has raised.
class WithoutGil {
 public:
  WithoutGil() : before_(std::exchange(check_interrupt, is_main_thread ? check : nullptr)) {}
  ~WithoutGil() { check_interrupt = before_; }

  template <class F>
  auto operator()(F&& f) const -> decltype(f()) {
    try {
      const nb::gil_scoped_release released;
      return f();
    } catch (const Interrupted&) {
      if (PyErr_Occurred()) throw nb::python_error();
      throw;
    }
  }

 private:
  static void check() {
    const nb::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0)
      throw Interrupted("A signal handler of this rank, such as that of Ctrl-C, has ended its wait.");
  }

  static thread_local const bool is_main_thread;  // Python tells only that one of signals
  void (*const before_)();
};
thread_local const bool WithoutGil::is_main_thread = getpid() == static_cast<pid_t>(syscall(SYS_gettid));

struct PyStopwatch {
  const PyTeam* owner;  // kept alive by Python
  std::unique_ptr<Stopwatch> watch;

  // Holds the team, too.
  std::shared_ptr<Stopwatch> open() const {
    return {watch.get(), [team = owner->get()](Stopwatch*) {}};
  }
};

std::optional<DType> parse_wire(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const DType wire = parse_dtype(name);
  if (wire != DType::float16 && wire != DType::bfloat16)
    throw nb::value_error("Values are sent as they are, or as float16 or bfloat16.");
  return wire;
}

// The MPI library as mpi4py knows it, and a communicator. Duplicated where it is used.
class PyMpi {
 public:
  PyMpi(const std::string& module_path, int handle_size, intptr_t comm,
        const std::map<std::string, intptr_t>& constants, const std::map<std::string, intptr_t>& dtypes,
        const std::map<std::string, intptr_t>& ops)
      : module_path_(module_path), handle_size_(handle_size), comm_(comm), constants_{constants.at("BYTE"),
                                                                                      constants.at("ERRORS_RETURN"),
                                                                                      constants.at("STATUS_IGNORE"),
                                                                                      constants.at("IN_PLACE"),
                                                                                      {},
                                                                                      {}} {
    for (const auto& [name, handle] : dtypes) constants_.dtypes[parse_dtype(name)] = handle;
    for (const auto& [name, handle] : ops) constants_.ops[parse_op(name)] = handle;
  }
  std::vector<int> nodes(const std::vector<int>& host_of_rank) const {
    return nodes_that_share_memory(*connect(), host_of_rank);
  }
  std::unique_ptr<Transport> transport(const std::vector<int>& node_of_rank) const {
    return make_mpi_transport(connect(), node_of_rank);
  }

 private:
  std::unique_ptr<mpi::Communicator> connect() const {
    return mpi::connect(module_path_, handle_size_, comm_, constants_);
  }

  std::string module_path_;
  int handle_size_;
  intptr_t comm_;
  mpi::Constants constants_;
};

using Spec = std::tuple<std::string, std::string, int64_t>;

PyPlan make_plan(const PyTeam& owner, const std::string& name, const std::vector<Spec>& tensors, const std::string& op,
                 bool weighted, const std::string& wire, bool in_segment, bool pipelined, size_t bucket_bytes) {
  std::vector<TensorSpec> specs;
  for (const auto& [tensor, dtype, count] : tensors) {
    if (count < 0) throw nb::value_error("A tensor has 0 elements or more.");
    specs.push_back({tensor, parse_dtype(dtype), count});
  }
  const auto team = owner.get();
  const PlanOptions options{parse_op(op), weighted, parse_wire(wire), in_segment || pipelined, bucket_bytes};
  const auto plan = WithoutGil()([&] { return team->make_plan(name, specs, options); });
  const auto pipeline = pipelined ? team->make_pipeline(*plan) : nullptr;
  return {&owner, plan, pipeline, registry::add(team, plan, pipeline)};
}

void allreduce(const PyTeam& owner, const Bytes& data, const std::string& dtype, const std::string& op,
               const std::string& path, const std::string& wire, const std::string& what,
               const std::vector<int64_t>& shape) {
  const DType type = parse_dtype(dtype);
  const auto team = owner.get();
  const auto sent = parse_wire(wire);
  WithoutGil()([&] {
    team->allreduce(data.data(), static_cast<int64_t>(data.size() / size_of(type)), type, parse_op(op), sent,
                    path.empty() ? std::nullopt : std::optional(parse_path(path)), what, shape);
  });
}

void allgather(const PyTeam& owner, const ConstBytes& in, const Bytes& out, const std::vector<int64_t>& counts) {
  const auto team = owner.get();
  size_t total = 0;
  for (const int64_t count : counts) total += static_cast<size_t>(count);
  const auto size = static_cast<size_t>(team->topology().size);
  if (counts.size() != size || total != out.size() ||
      static_cast<size_t>(counts[static_cast<size_t>(team->topology().rank)]) != in.size())
    throw nb::value_error("allgather: the counts do not match the ranks or the sizes of the arrays.");
  WithoutGil()([&] { team->allgather(in.data(), out.data(), {counts.begin(), counts.end()}); });
}

void alltoall(const PyTeam& owner, const ConstBytes& in, const std::vector<size_t>& to, const Bytes& out,
              const std::vector<size_t>& from) {
  const auto team = owner.get();
  const auto size = static_cast<size_t>(team->topology().size);
  if (to.size() != size || from.size() != size || std::accumulate(to.begin(), to.end(), size_t{0}) != in.size() ||
      std::accumulate(from.begin(), from.end(), size_t{0}) != out.size())
    throw nb::value_error("alltoall: the counts do not match the ranks or the sizes of the arrays.");
  WithoutGil()([&] { team->alltoall(in.data(), to, out.data(), from); });
}

nb::dict report(const PyTeam& team) {
  const TeamReport r = team.get()->report();
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
  nb::class_<PyMpi>(m, "Mpi")
      .def(nb::init<const std::string&, int, intptr_t, const std::map<std::string, intptr_t>&,
                    const std::map<std::string, intptr_t>&, const std::map<std::string, intptr_t>&>(),
           "module_path"_a, "handle_size"_a, "comm"_a, "constants"_a, "dtypes"_a, "ops"_a,
           "Collective: a communicator of the MPI library that mpi4py has loaded.")
      .def("nodes", &PyMpi::nodes, release, "host_of_rank"_a,
           "Collective: the node of each rank. Ranks of a host that cannot share memory are not on one.")
      .def("transport", &PyMpi::transport, release, "node_of_rank"_a, "Collective: a way to reach the ranks.");
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
            const OpenPlan open = plan.open();
            open.check(tensor, data.size());
            open.start(tensor, data.data(), weight);
          },
          "tensor"_a, "data"_a.noconvert(), "weight"_a = 1.0)
      .def(
          "start_at",
          [](const PyPlan& plan, int tensor, uintptr_t address, size_t nbytes, double weight) {
            const OpenPlan open = plan.open();
            open.check(tensor, nbytes);
            open.start(tensor, reinterpret_cast<void*>(address), weight);
          },
          "tensor"_a, "address"_a, "nbytes"_a, "weight"_a = 1.0, "The same, of memory that lives until the wait ends.")
      .def(
          "wait",
          [](const PyPlan& plan, int tensor) {
            const OpenPlan open = plan.open();
            open.check(tensor);
            WithoutGil()([&] { open.wait(tensor); });
          },
          "tensor"_a)
      .def(
          "wait_all",
          [](const PyPlan& plan) {
            const OpenPlan open = plan.open();
            WithoutGil()([&] {
              for (int tensor = 0; tensor < open.plan->layout().tensor_count(); ++tensor) open.wait(tensor);
            });
          },
          "For every tensor of the plan, in order.")
      .def(
          "memory",
          [](const PyPlan& plan, int tensor) {
            const OpenPlan open = plan.open();
            open.check(tensor);
            const Range& range = open.plan->layout().range(tensor);
            auto* kept = new std::shared_ptr<std::byte>(open.plan->memory());
            const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<std::byte>*>(p); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(kept->get() + range.begin, {range.size()}, owner);
          },
          "tensor"_a, "The bytes of a tensor that lives in the plan's segment.")
      .def(
          "set_schedule",
          [](const PyPlan& plan, uint64_t synchronous, uint64_t pipelined) {
            plan.open().pipeline().set_schedule(synchronous, pipelined);
          },
          "synchronous"_a, "pipelined"_a, "How many steps from now are synchronous, and then pipelined.")
      .def(
          "end",
          [](const PyPlan& plan) {
            const OpenPlan open = plan.open();
            open.team->end_plan(*open.plan);
            registry::remove(open.plan.get());
          },
          "Frees the plan. On every rank, between steps.")
      .def("updates", [](const PyPlan& plan) { return plan.open().pipeline().updates(); })
      .def(
          "second",
          [](const PyPlan& plan, int tensor, const Bytes& data) {
            const OpenPlan open = plan.open();
            open.check(tensor, data.size());
            WithoutGil()([&] { open.pipeline().second(tensor, data.data()); });
          },
          "tensor"_a, "data"_a.noconvert())
      .def("outstanding", [](const PyPlan& plan) { return plan.open().pipeline().outstanding(); })
      .def(
          "take",
          [](const PyPlan& plan, const std::vector<Bytes>& out, bool keep) {
            const OpenPlan open = plan.open();
            std::vector<void*> data;
            for (size_t i = 0; i < out.size(); ++i) {
              open.check(static_cast<int>(i), out[i].size());
              data.push_back(out[i].data());
            }
            if (data.size() != open.plan->tensors().size())
              throw nb::value_error("Expected an array for each tensor of the plan.");
            return WithoutGil()([&] { return open.pipeline().take(data, keep); });
          },
          "out"_a, "keep"_a, "The outstanding average, into arrays; False if there is none.")
      .def(
          "put",
          [](const PyPlan& plan, const std::vector<ConstBytes>& arrays) {
            const OpenPlan open = plan.open();
            std::vector<const void*> data;
            for (size_t i = 0; i < arrays.size(); ++i) {
              open.check(static_cast<int>(i), arrays[i].size());
              data.push_back(arrays[i].data());
            }
            if (data.size() != open.plan->tensors().size())
              throw nb::value_error("Expected an array for each tensor of the plan.");
            open.pipeline().put(data);
          },
          "arrays"_a, "Makes an average outstanding that an earlier process took.");

  nb::class_<PyTeam>(m, "Team")
      .def(nb::init<std::unique_ptr<Transport>, int, int, double, double, const std::string&>(), release, "transport"_a,
           "number"_a, "threads"_a, "timeout_seconds"_a, "stall_seconds"_a, "waiting"_a = "auto", "Collective.")
      .def_prop_ro("id", &PyTeam::id)
      .def_prop_ro("rank", [](const PyTeam& team) { return team.get()->topology().rank; })
      .def_prop_ro("size", [](const PyTeam& team) { return team.get()->topology().size; })
      .def_prop_ro("node_count", [](const PyTeam& team) { return team.get()->topology().node_count; })
      .def_prop_ro("threads", [](const PyTeam& team) { return team.get()->threads(); })
      .def("plan", &make_plan, "name"_a, "tensors"_a, "op"_a, "weighted"_a, "wire_dtype"_a = "", "in_segment"_a = false,
           "pipelined"_a = false, "bucket_bytes"_a = 0, nb::keep_alive<0, 1>(),
           "Collective: a plan for tensors (name, dtype, count).")
      .def("allreduce", &allreduce, "data"_a.noconvert(), "dtype"_a, "op"_a, "path"_a = "", "wire_dtype"_a = "",
           "what"_a = "", "shape"_a = std::vector<int64_t>())
      .def(
          "broadcast",
          [](const PyTeam& owner, const Bytes& data, int root) {
            const auto team = owner.get();
            WithoutGil()([&] { team->broadcast(data.data(), data.size(), root); });
          },
          "data"_a.noconvert(), "root"_a)
      .def("allgather", &allgather, "data"_a.noconvert(), "out"_a.noconvert(), "nbytes_by_rank"_a)
      .def("alltoall", &alltoall, "data"_a.noconvert(), "to"_a, "out"_a.noconvert(), "received"_a)
      .def(
          "allgather_count",
          [](const PyTeam& owner, int64_t mine) {
            const auto team = owner.get();
            return WithoutGil()([&] { return team->allgather_count(mine); });
          },
          "mine"_a)
      .def("barrier",
           [](const PyTeam& owner) {
             const auto team = owner.get();
             WithoutGil()([&] { team->barrier(); });
           })
      .def(
          "agree",
          [](const PyTeam& owner, const std::string& what, const std::vector<std::string>& items) {
            const auto team = owner.get();
            WithoutGil()([&] { team->agree(what, items); });
          },
          "what"_a, "items"_a)
      .def(
          "add_choice",
          [](const PyTeam& team, const std::string& place, size_t from, size_t to, const std::string& way) {
            team.get()->allreduce_call().choices().add(Choices::Named{place, from, to, way});
          },
          "place"_a, "begin"_a, "end"_a, "way"_a)
      .def("choices",
           [](const PyTeam& team) {
             nb::list rows;
             for (const auto& c : team.get()->allreduce_call().choices().all())
               rows.append(nb::make_tuple(c.place, c.from, c.to, c.way));
             return rows;
           })
      .def(
          "empty",
          [](const PyTeam& owner_of_area, int64_t nbytes) {
            if (nbytes < 0) throw nb::value_error("An array has 0 bytes or more.");
            const auto team = owner_of_area.get();
            const auto area = WithoutGil()([&] { return team->make_area(static_cast<size_t>(nbytes)); });
            auto* kept = new std::shared_ptr<Area>(area);
            const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<Area>*>(p); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(area->of(team->topology().local_rank),
                                                                {static_cast<size_t>(nbytes)}, owner);
          },
          "nbytes"_a, "Collective: bytes that the ranks of the node can reach directly.")
      .def("leave", [](const PyTeam& team) { team.if_open([](Team& open) { open.leave(); }); })
      .def("report", &report)
      .def("stalls", &stalls, release,
           "Waits longer than stall_seconds: (what, number, detail, tensor, seconds, ranks awaited as seen here).")
      .def("take_resolved", &take_resolved, release, "Those that came to a good end since the last call.")
      .def("progress", &progress, release,
           "For each kind of wait the last number begun, and the tensors not started in it.")
      .def("close", &PyTeam::close, release, "Collective.");

  nb::class_<PyStopwatch>(m, "Stopwatch")
      .def(
          "__init__",
          [](PyStopwatch* self, const PyTeam& team, size_t nbytes, int tensors, const std::string& wire) {
            new (self) PyStopwatch{&team, std::make_unique<Stopwatch>(*team.get(), nbytes, tensors, parse_wire(wire))};
          },
          release, "team"_a, "nbytes"_a, "tensors"_a, "wire_dtype"_a = "", nb::keep_alive<1, 2>(), "Collective.")
      .def(
          "can", [](const PyStopwatch& watch, const std::string& way) { return watch.open()->can(way); }, "way"_a)
      .def(
          "chosen", [](const PyStopwatch& watch, const std::string& way) { return watch.open()->chosen(way); }, "way"_a)
      .def(
          "verify", [](const PyStopwatch& watch, const std::string& way) { return watch.open()->verify(way); }, release,
          "way"_a)
      .def(
          "time",
          [](const PyStopwatch& watch, const std::string& way, int repeats, int batch) {
            return watch.open()->time(way, repeats, batch);
          },
          release, "way"_a, "repeats"_a, "batch"_a = 1);

  nb::class_<ControlGroup>(m, "ControlGroup")
      .def_ro("memory_limit", &ControlGroup::memory_limit)
      .def_ro("memory_left", &ControlGroup::memory_left)
      .def_ro("cores", &ControlGroup::cores)
      .def_ro("cores_of", &ControlGroup::cores_of);
  m.def("control_group", &ControlGroup::mine, "root"_a = "",
        "What the control groups of this process allow it; below another root folder, for tests.");

  m.def("set_tracing", [](bool enabled) { trace::enabled = enabled; }, "enabled"_a);
  m.def("take_trace", &take_trace, "Events (name, kind, team, begin, end) since the last call; seconds.");
}
