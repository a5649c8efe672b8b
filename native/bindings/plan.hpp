// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/python.hpp"
#include "bindings/team.hpp"

namespace keras_hpc {

// A plan of a team that is open, for the time of a call.
struct OpenPlan {
  std::shared_ptr<Team> team;
  std::shared_ptr<Plan> plan;
  std::shared_ptr<Pipeline> of_pipeline;  // null: steps are synchronous
  std::shared_ptr<LocalSteps> of_local;   // null: it has no local steps

  void start(int tensor, void* data, double weight) const {
    const nb::gil_scoped_release released;
    if (of_pipeline != nullptr)
      of_pipeline->start(tensor, data, weight);
    else if (of_local != nullptr)
      of_local->start(tensor, data);
    else
      team->start(*plan, tensor, data, weight);
  }
  void wait(int tensor) const {
    if (of_pipeline != nullptr)
      of_pipeline->wait(tensor);
    else if (of_local != nullptr)
      of_local->wait(tensor);
    else
      team->wait(*plan, tensor);
  }
  Pipeline& pipeline() const {
    if (of_pipeline == nullptr) throw Error("Plan '" + plan->name() + "' is not pipelined.");
    return *of_pipeline;
  }
  LocalSteps& local() const {
    if (of_local == nullptr) throw Error("Plan '" + plan->name() + "' has no local steps.");
    return *of_local;
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
  std::weak_ptr<LocalSteps> local = {};

  OpenPlan open() const {
    OpenPlan all{owner->get(), plan.lock(), pipeline.lock(), local.lock()};
    if (all.plan == nullptr) throw Error("The plan has ended.");
    return all;
  }
};

using Spec = std::tuple<std::string, std::string, int64_t>;

PyPlan make_plan(const PyTeam& owner, const std::string& name, const std::vector<Spec>& tensors, const std::string& op,
                 bool weighted, const std::string& wire, bool in_segment, bool pipelined, size_t bucket_bytes,
                 const std::vector<int>& givers, const std::vector<std::vector<std::pair<int64_t, int>>>& takers,
                 bool in_tree);

nb::class_<PyPlan> bind_plan(nb::module_& m);

}  // namespace keras_hpc
