// SPDX-License-Identifier: Apache-2.0
#include "bindings/plan.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace keras_hpc {

PyPlan make_plan(const PyTeam& owner, const std::string& name, const std::vector<Spec>& tensors, const std::string& op,
                 bool weighted, const std::string& wire, bool in_segment, bool pipelined, size_t bucket_bytes,
                 const std::vector<int>& givers, const std::vector<std::vector<std::pair<int64_t, int>>>& takers,
                 bool in_tree) {
  std::vector<TensorSpec> specs;
  for (const auto& [tensor, dtype, count] : tensors) {
    if (count < 0) throw nb::value_error("A tensor has 0 elements or more.");
    specs.push_back({tensor, parse_dtype(dtype), count});
  }
  const auto team = owner.get();
  PlanOptions options{parse_op(op), weighted, parse_wire(wire), in_segment || pipelined,
                      bucket_bytes, in_tree,  givers,           {}};
  if (pipelined && !takers.empty()) throw nb::value_error("All ranks need all of a pipelined plan.");
  for (const auto& of_tensor : takers) {
    Shares& shares = options.takers.emplace_back();
    for (const auto& [end, rank] : of_tensor) shares.push_back({end, rank});
  }
  const auto plan = WithoutGil()([&] { return team->make_plan(name, specs, options); });
  const auto pipeline = pipelined ? team->make_pipeline(*plan) : nullptr;
  return {&owner, plan, pipeline, registry::add(team, plan, pipeline)};
}

nb::class_<PyPlan> bind_plan(nb::module_& m) {
  return nb::class_<PyPlan>(m, "Plan")
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
            const nb::gil_scoped_release released;
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
}

}  // namespace keras_hpc
