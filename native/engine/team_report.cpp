// SPDX-License-Identifier: Apache-2.0
// What a team says of itself: how far it is with its plans, and what it has done.
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {

std::vector<PlanProgress> Team::progress_of_plans() const {
  std::vector<PlanProgress> all;
  const std::lock_guard lock(plans_mutex_);
  for (const auto& plan : plans_) all.push_back(plan->progress());
  return all;
}

TeamReport Team::report() const {
  TeamReport report;
  report.exposed_seconds = exposed_seconds_;
  report.progress_seconds = progress_seconds_;
  report.segment_bytes = allreduce_->segment_bytes() / at(topology().local_size());
  std::set<std::string> algorithms;
  if (const Exchanges* exchanges = exchanges_of_all_)
    report.segment_bytes += exchanges->segment_bytes() / at(topology().local_size());
  const std::lock_guard lock(plans_mutex_);
  report.steps = ended_plans_.executions;
  report.bytes = ended_plans_.bytes;
  report.wire_seconds = ended_plans_.seconds;
  for (const auto& plan : plans_) {
    report.segment_bytes += plan->segment_bytes() / at(topology().local_size());
    const PlanTotals totals = plan->totals();
    report.steps += totals.executions;
    report.bytes += totals.bytes;
    report.wire_seconds += totals.seconds;
    report.plan_bytes += plan->layout().nbytes();
    for (const Algorithm algorithm : plan->algorithms()) algorithms.insert(name_of(algorithm));
  }
  if (topology().local_size() > 1) report.algorithm = "shared memory";
  for (const std::string& name : algorithms) report.algorithm += (report.algorithm.empty() ? "" : ", ") + name;
  return report;
}

}  // namespace keras_hpc
