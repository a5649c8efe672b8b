// SPDX-License-Identifier: Apache-2.0
#include "bindings/local_steps.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <string>
#include <tuple>

#include "engine/local_steps.hpp"

namespace keras_hpc {
namespace {

LocalSteps::Kind parse_kind(const std::string& name) {
  if (name == "anchor") return LocalSteps::Kind::anchor;
  if (name == "velocity") return LocalSteps::Kind::velocity;
  if (name == "mean") return LocalSteps::Kind::mean;
  if (name == "sent") return LocalSteps::Kind::sent;
  throw nb::value_error(("Expected anchor, velocity, mean or sent. Received: " + name).c_str());
}

}  // namespace

void bind_local_steps(nb::class_<PyPlan>& plan) {
  plan.def(
          "make_local",
          [](PyPlan& self, uint64_t every, uint64_t overlap, int weights, bool outer, double rate, double momentum) {
            const OpenPlan open = self.open();
            const auto local =
                open.team->make_local_steps(*open.plan, {every, overlap, weights, outer, rate, momentum});
            self.local = local;
            registry::set_local(open.plan.get(), local);
          },
          "every"_a, "overlap"_a, "weights"_a, "outer"_a, "rate"_a, "momentum"_a,
          "From now on it averages weights after periods of local steps.")
      .def(
          "set_local_schedule",
          [](const PyPlan& self, uint64_t synchronous, uint64_t local) {
            self.open().local().set_schedule(synchronous, local);
          },
          "synchronous"_a, "local"_a, "How many steps from now are synchronous, and then local.")
      .def(
          "begin_local", [](const PyPlan& self, double samples) { return self.open().local().begin(samples); },
          "samples"_a)
      .def(
          "set_anchor",
          [](const PyPlan& self, int tensor, const ConstBytes& weights) {
            const OpenPlan open = self.open();
            open.check(tensor, weights.size());
            open.local().set_anchor(tensor, weights.data());
          },
          "tensor"_a, "weights"_a.noconvert())
      .def("local_taken", [](const PyPlan& self) { return self.open().local().taken(); })
      .def("finish_local", [](const PyPlan& self) { return self.open().local().finish(); })
      .def(
          "local_state",
          [](const PyPlan& self) {
            const OpenPlan open = self.open();
            const auto state = WithoutGil()([&] { return open.local().state(); });
            return std::make_tuple(state.since, state.samples, state.anchored, state.travelling);
          },
          "Steps and samples of the running period; whether the anchors, and a mean that was sent, count.")
      .def(
          "restore_local",
          [](const PyPlan& self, uint64_t since, double samples, bool anchored, bool travelling) {
            self.open().local().restore({since, samples, anchored, travelling});
          },
          "since"_a, "samples"_a, "anchored"_a, "travelling"_a)
      .def(
          "local_memory",
          [](const PyPlan& self, const std::string& kind, int tensor) {
            const OpenPlan open = self.open();
            auto* kept = new std::shared_ptr<LocalSteps>(open.of_local);
            const nb::capsule owner(kept,
                                    [](void* p) noexcept { delete static_cast<std::shared_ptr<LocalSteps>*>(p); });
            auto& memory = open.local().memory(parse_kind(kind), tensor);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory.data(), {memory.size()}, owner);
          },
          "kind"_a, "tensor"_a, "The bytes of anchor, velocity, mean or sent of a tensor.");
}

}  // namespace keras_hpc
