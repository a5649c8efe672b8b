// SPDX-License-Identifier: Apache-2.0
#include "bindings/team.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <numeric>
#include <tuple>
#include <vector>

#include "bindings/plan.hpp"
#include "transport/transport.hpp"

namespace keras_hpc {
namespace {

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
    reached["exchange"] = {open.activity().exchanges, {}};
  });
  return reached;
}

}  // namespace

void bind_team(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<PyTeam>(m, "Team")
      .def(nb::init<std::unique_ptr<Transport>, int, int, double, double, const std::string&>(), release, "transport"_a,
           "number"_a, "threads"_a, "timeout_seconds"_a, "stall_seconds"_a, "waiting"_a = "auto", "Collective.")
      .def_prop_ro("id", &PyTeam::id)
      .def_prop_ro("rank", [](const PyTeam& team) { return team.get()->topology().rank; })
      .def_prop_ro("size", [](const PyTeam& team) { return team.get()->topology().size; })
      .def_prop_ro("node_count", [](const PyTeam& team) { return team.get()->topology().node_count; })
      .def_prop_ro(
          "nodes_are_branches", [](const PyTeam& team) { return team.get()->topology().nodes_are_branches(); },
          "Whether plans can add up in the order of a tree.")
      .def_prop_ro("threads", [](const PyTeam& team) { return team.get()->threads(); })
      .def("plan", &make_plan, "name"_a, "tensors"_a, "op"_a, "weighted"_a, "wire_dtype"_a = "", "in_segment"_a = false,
           "pipelined"_a = false, "bucket_bytes"_a = 0, "givers"_a = std::vector<int>(),
           "takers"_a = std::vector<std::vector<std::pair<int64_t, int>>>(), "in_tree"_a = false,
           nb::keep_alive<0, 1>(),
           "Collective: a plan for tensors (name, dtype, count); of a sum, perhaps the rank that alone gives each; or "
           "for "
           "each the ranks that alone need its elements: up to (end, rank) of one after the other.")
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
      .def_prop_ro(
          "takes_device_memory", [](const PyTeam& team) { return team.get()->takes_device_memory(); },
          "Whether messages may be in memory of GPUs.")
      .def("leave", [](const PyTeam& team) { team.if_open([](Team& open) { open.leave(); }); })
      .def(
          "look_around", [](const PyTeam& team) { team.if_open([](Team& open) { open.look_around(); }); }, release,
          "Once in a while, where the team has no threads: hears what other nodes tell.")
      .def("report", &report)
      .def("stalls", &stalls, release,
           "Waits longer than stall_seconds: (what, number, detail, tensor, seconds, ranks awaited as seen here).")
      .def("take_resolved", &take_resolved, release, "Those that came to a good end since the last call.")
      .def("progress", &progress, release,
           "For each kind of wait the last number begun, and the tensors not started in it.")
      .def("close", &PyTeam::close, release, "Collective.");
}

}  // namespace keras_hpc
