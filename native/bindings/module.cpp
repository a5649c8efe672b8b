// SPDX-License-Identifier: Apache-2.0
// Conversions between Python and the engine; no algorithm.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "algorithms/allreduce.hpp"
#include "bindings/device.hpp"
#include "bindings/exchange.hpp"
#include "bindings/local_steps.hpp"
#include "bindings/plan.hpp"
#include "bindings/team.hpp"
#include "bindings/transports.hpp"
#include "common/control_group.hpp"
#include "common/late.hpp"
#include "engine/stopwatch.hpp"
#include "engine/trace.hpp"

using namespace keras_hpc;

namespace {

struct PyStopwatch {
  const PyTeam* owner;  // kept alive by Python
  std::unique_ptr<Stopwatch> watch;

  // Holds the team, too.
  std::shared_ptr<Stopwatch> open() const {
    return {watch.get(), [team = owner->get()](Stopwatch*) {}};
  }
};

nb::bytes take_trace() {
  std::string events;
  {
    const nb::gil_scoped_release release;
    events = trace::take();
  }
  return nb::bytes(events.data(), events.size());
}

// What each of some ranks sends in an allreduce of so many elements. Flow is "all", "takers" or "givers", extents are
// (begin, end, peer).
std::vector<size_t> elements_sent(const std::string& algorithm, int ranks, size_t count, const std::string& flow,
                                  const std::vector<std::tuple<size_t, size_t, int>>& extents) {
  Partial how{flow == "all" ? Flow::to_all : flow == "takers" ? Flow::to_takers : Flow::from_givers, {}};
  for (const auto& [begin, end, peer] : extents) how.extents.push_back({begin, end, peer});
  std::vector<size_t> sent;
  std::vector<int> everyone;
  for (int rank = 0; rank < ranks; ++rank) everyone.push_back(rank);
  for (int rank = 0; rank < ranks; ++rank) {
    Schedules schedules({everyone, rank});
    size_t& elements = sent.emplace_back(0);
    for (const Step& step : schedules.of(parse_algorithm(algorithm), count, how))
      for (const Move& move : step.sends) elements += move.end - move.begin;
  }
  return sent;
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
  bind_transports(m);
  auto plan = bind_plan(m);
  bind_device(m, plan);
  bind_local_steps(plan);
  bind_team(m);
  bind_exchange(m);

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

  nb::class_<Late>(m, "Late", "Says so when a call takes long that holds the interpreter, and ends the process.")
      .def(nb::init<double, double, std::string, std::string>(), "stall_seconds"_a, "timeout_seconds"_a, "report"_a,
           "end"_a)
      .def("stop", &Late::stop);

  m.def("elements_sent", &elements_sent, "algorithm"_a, "ranks"_a, "count"_a, "flow"_a, "extents"_a,
        "What each of some ranks sends in an allreduce.");
  m.def("set_tracing", [](bool enabled) { trace::enabled = enabled; }, "enabled"_a);
  m.def("take_trace", &take_trace,
        "Events since the last call, a JSON list of [name, kind, team, begin, end], in seconds; nothing if there are "
        "none.");
}
