// SPDX-License-Identifier: Apache-2.0
#include "engine/team.hpp"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <set>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/trace.hpp"

namespace keras_hpc {
namespace {

// Where a rank runs, for the others on its node.
struct Seat {
  cpu_set_t cores;
  int64_t scheduler_group;
};

// The group in which the kernel shares out time among this process and others, if it has such groups.
int64_t scheduler_group() {
  long long number = 0;
  if (std::FILE* file = std::fopen("/proc/self/autogroup", "r")) {
    if (std::fscanf(file, "/autogroup-%lld", &number) != 1) number = 0;
    std::fclose(file);
  }
  return number;
}

// What ranks compare, beside how many elements of which dtype they reduce.
uint64_t tag_of(const std::string& what, const std::vector<int64_t>& shape) {
  uint64_t tag = what.empty() ? 0 : std::hash<std::string>{}(what);
  for (const int64_t length : shape) tag = (tag ^ static_cast<uint64_t>(length + 1)) * 0x100000001b3ULL;
  return tag;
}

// ", shape (2, 3)"
std::string text_of(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t length : shape) text += (text.empty() ? "" : ", ") + std::to_string(length);
  return text.empty() ? "" : ", shape (" + text + (shape.size() == 1 ? ",)" : ")");
}

// Copying less than this takes less time than asking the clock what it took.
constexpr size_t kQuickBytes = 4096;

}  // namespace

Team::Team(std::unique_ptr<Transport> transport, int number, const TeamOptions& options)
    : transport_(std::move(transport)),
      options_(options),
      control_(transport_->open_channel()),
      activity_(options.stall_seconds) {
  const auto local = at(topology().local_size());
  bells_ = transport_->open_segment(*control_, local * (sizeof(Bell) + sizeof(Seat)));
  context_ = {number,
              &topology(),
              reinterpret_cast<Bell*>(bells_->data()),
              {},
              options_.timeout_seconds,
              options_.stall_seconds,
              &activity_};
  const Patience fitting = find_patience();  // collective
  context_.patience = options_.patience.value_or(fitting);
  for (int i = 0; i < std::max(1, options_.threads); ++i) {
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->channel = transport_->open_channel();
  }
  allreduce_ = std::make_unique<AllreduceCall>(context_, *transport_, *control_);
  if (topology().size == 1) options_.threads = 0;  // nothing to communicate
  for (int i = 0; i < options_.threads; ++i) lanes_[at(i)]->thread = std::thread([this, i] { serve(i); });
}

Team::~Team() {
  stopping_ = true;
  context_.my_bell().ring();
  for (auto& lane : lanes_)
    if (lane->thread.joinable()) lane->thread.join();
}

Patience Team::find_patience() {
  auto* seats = reinterpret_cast<Seat*>(context_.bells + topology().local_size());
  Seat& mine = seats[topology().local_rank];
  sched_getaffinity(0, sizeof mine.cores, &mine.cores);
  mine.scheduler_group = scheduler_group();
  barrier();
  cpu_set_t all;
  CPU_ZERO(&all);
  bool same_group = true;
  for (int r = 0; r < topology().local_size(); ++r) {
    CPU_OR(&all, &all, &seats[r].cores);
    same_group = same_group && seats[r].scheduler_group == mine.scheduler_group;
  }
  return patience_for(topology().local_size(), CPU_COUNT(&all), same_group);
}

// ---- plans

Plan& Team::make_plan(const std::string& name, const std::vector<TensorSpec>& tensors, Op op, bool weighted,
                      std::optional<DType> wire, bool in_segment) {
  if (tensors.empty()) throw Error("Plan '" + name + "' has no tensors.");
  std::vector<std::string> items;
  items.push_back(std::string(name_of(op)) + (weighted ? ", weighted" : "") +
                  (wire ? std::string(", sent as ") + name_of(*wire) : "") + (in_segment ? ", in the segment" : ""));
  for (const TensorSpec& tensor : tensors)
    items.push_back(tensor.name + ": " + std::to_string(tensor.count) + " x " + name_of(tensor.dtype));
  agree("The tensors of plan '" + name + "'", items);
  const auto algorithm_for = [this](size_t nbytes) { return allreduce_->algorithm_for(nbytes, true); };
  const std::lock_guard control(control_mutex_);
  auto plan =
      std::make_unique<Plan>(context_, next_plan_++, name, tensors, op, weighted, static_cast<int>(lanes_.size()), wire,
                             in_segment, algorithm_for, *transport_, *control_);
  const std::lock_guard lock(plans_mutex_);
  plans_.push_back(std::move(plan));
  plan_count_.store(plans_.size(), std::memory_order_release);
  return *plans_.back();
}

Pipeline& Team::make_pipeline(Plan& plan) {
  const std::lock_guard lock(plans_mutex_);
  return *pipelines_.emplace_back(std::make_unique<Pipeline>(*this, plan));
}

void Team::end_plan(Plan& plan) {
  throw_if_failed();
  if (plan.is_active()) throw Error(plan.what() + " cannot end: a step of it has begun and is not over.");
  std::vector<std::unique_lock<std::mutex>> held;  // so no lane works on it
  for (const auto& lane : lanes_) held.emplace_back(lane->mutex);
  const std::lock_guard lock(plans_mutex_);
  const PlanTotals totals = plan.totals();
  ended_plans_.executions += totals.executions;
  ended_plans_.bytes += totals.bytes;
  ended_plans_.seconds += totals.seconds;
  for (const auto& lane : lanes_)
    lane->plans.erase(std::remove(lane->plans.begin(), lane->plans.end(), &plan), lane->plans.end());
  pipelines_.erase(std::remove_if(pipelines_.begin(), pipelines_.end(), [&](const auto& p) { return p->is_of(plan); }),
                   pipelines_.end());
  plans_.erase(std::remove_if(plans_.begin(), plans_.end(), [&](const auto& p) { return p.get() == &plan; }),
               plans_.end());
  plan_count_.store(plans_.size(), std::memory_order_release);
}

void Team::start(Plan& plan, int tensor, void* data, double weight) {
  throw_if_failed();
  const auto begin = trace::enabled ? Clock::now() : Clock::time_point();
  const bool more_to_do = plan.start(tensor, data, weight);
  if (trace::enabled) trace::record(plan.tensors()[at(tensor)].name, "start", number(), begin);
  if (options_.threads != 0 || (!more_to_do && topology().node_count == 1)) return;
  try {
    progress_all();
  } catch (const std::exception& e) {
    fail(std::current_exception(), e.what());
    throw;
  }
}

void Team::wait(Plan& plan, int tensor) {
  plan.check_started(tensor);
  const size_t nbytes = plan.layout().range(tensor).size();
  const bool quick = plan.is_complete(tensor) && nbytes < kQuickBytes && !trace::enabled;
  const auto begin = quick ? Clock::time_point() : Clock::now();
  try {
    if (!quick && !plan.is_complete(tensor)) await(plan, tensor);
  } catch (const std::exception& e) {
    fail(std::current_exception(), e.what());
    throw;
  }
  plan.finish(tensor);
  if (!quick) add(exposed_seconds_, seconds_since(begin));
  if (trace::enabled) trace::record(plan.tensors()[at(tensor)].name, "wait", number(), begin);
}

void Team::await(Plan& plan, int tensor) {
  const auto begin = Clock::now();
  const auto ready = [&] {
    throw_if_failed();
    if (plan.is_complete(tensor)) return true;
    progress_all();
    if (plan.is_complete(tensor)) return true;
    throw_if_abandoned(plan, tensor, begin);
    return false;
  };
  const auto polling = [&] {
    for (int lane = 0; lane < static_cast<int>(lanes_.size()); ++lane)
      if (options_.threads == 0 && network_is_busy(lane)) return true;
    return false;
  };
  if (!wait_watched(context_, ready, polling, [&] { return stall(plan, tensor, begin); }))
    throw Timeout(late(plan, tensor));
}

bool Team::wait_all_async(Plan& plan, void (*done)(void*, const char*), void* arg) {
  throw_if_failed();
  if (options_.threads == 0) return false;
  {
    const std::lock_guard lock(async_mutex_);
    async_.push_back({&plan, done, arg, Clock::now()});
  }
  context_.my_bell().ring();
  return true;
}

std::string Team::late(const Plan& plan, int tensor) const {
  return plan.describe(tensor) + ": after " + std::to_string(static_cast<int>(options_.timeout_seconds)) +
         " s not every rank has started it. Missing, as far as this rank sees: rank " +
         joined(plan.missing_ranks(tensor)) + ". Do all ranks run the same number of steps?";
}

Stall Team::stall(const Plan& plan, int tensor, Clock::time_point since) const {
  return {plan.what(),
          plan.step(),
          plan.tensors()[at(tensor)].name,
          tensor,
          [&plan, tensor] { return plan.missing_ranks(tensor); },
          since};
}

// ---- progress

bool Team::progress(int lane_number) {
  Lane& lane = *lanes_[at(lane_number)];
  const std::unique_lock lock(lane.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return false;  // somebody else is at it
  const auto begin = Clock::now();
  bool advanced = false;
  if (lane.plans.size() != plan_count_.load(std::memory_order_acquire)) {
    const std::lock_guard plans(plans_mutex_);
    for (size_t i = lane.plans.size(); i < plans_.size(); ++i) lane.plans.push_back(plans_[i].get());
  }
  for (Plan* plan : lane.plans) advanced = plan->advance(lane_number, *lane.channel) || advanced;
  if (advanced) add(progress_seconds_, seconds_since(begin));
  return advanced;
}

bool Team::progress_all() {
  bool advanced = false;
  for (int lane = 0; lane < static_cast<int>(lanes_.size()); ++lane) advanced = progress(lane) || advanced;
  return advanced;
}

bool Team::network_is_busy(int lane) const {
  const std::lock_guard lock(plans_mutex_);
  return std::any_of(plans_.begin(), plans_.end(), [&](const auto& plan) { return plan->uses_network(lane); });
}

void Team::serve(int lane) {
  prctl(PR_SET_NAME, ("khpc-" + std::to_string(number()) + "." + std::to_string(lane)).c_str());
  prctl(PR_SET_TIMERSLACK, 1);  // naps of microseconds, not of 50
  const auto ready = [&] {
    const bool advanced = progress(lane);
    return (lane == 0 && complete_async()) || advanced || stopping_;
  };
  try {
    while (!stopping_)
      wait_for(context_.patience, context_.my_bell(), 3600, ready, [&] { return network_is_busy(lane); });
  } catch (const std::exception& e) {
    fail(std::current_exception(), e.what());
  }
}

bool Team::complete_async() {
  std::vector<AsyncWait> finished;
  std::exception_ptr failure;  // of one execution; those that are finished are completed first
  try {
    const std::lock_guard lock(async_mutex_);
    for (size_t i = 0; i < async_.size();) {
      AsyncWait& wait = async_[i];
      const int n = wait.plan->layout().tensor_count();
      int complete = 0;
      while (complete < n && wait.plan->is_complete(complete)) ++complete;
      if (complete < n) throw_if_abandoned(*wait.plan, complete, wait.begin);
      if (complete == n) {
        finished.push_back(wait);
        async_.erase(async_.begin() + static_cast<std::ptrdiff_t>(i));
      } else if (seconds_since(wait.begin) > options_.timeout_seconds) {
        throw Timeout(late(*wait.plan, complete));
      } else {
        if (!wait.stall && seconds_since(wait.begin) > options_.stall_seconds)
          wait.stall = std::make_shared<Activity::Note>(activity_, stall(*wait.plan, complete, wait.begin));
        ++i;
      }
    }
  } catch (const Error&) {
    failure = std::current_exception();
  }
  // Without the lock: the framework may go on with its step, and start the next plan, inside `done`.
  for (const AsyncWait& wait : finished) {
    if (wait.stall) wait.stall->resolve();
    for (int tensor = 0; tensor < wait.plan->layout().tensor_count(); ++tensor) wait.plan->finish(tensor);
    add(exposed_seconds_, seconds_since(wait.begin));
    if (trace::enabled) trace::record(wait.plan->name(), "wait", number(), wait.begin);
    wait.done(wait.arg, nullptr);
  }
  if (failure) std::rethrow_exception(failure);
  return !finished.empty();
}

void Team::fail(std::exception_ptr error, const char* text) {
  {
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::move(error);
  }
  failed_ = true;
  context_.my_bell().fate = Fate::failed;
  context_.ring_node();
  std::vector<AsyncWait> waiting;
  {
    const std::lock_guard lock(async_mutex_);
    waiting.swap(async_);
  }
  for (const AsyncWait& wait : waiting) wait.done(wait.arg, text);
}

void Team::throw_if_failed() const {
  if (!failed_) return;
  const std::lock_guard lock(error_mutex_);
  std::rethrow_exception(error_);
}

void Team::throw_if_abandoned(const Plan& plan, int tensor, Clock::time_point waiting_since) const {
  // A rank that fails often has a reason that this one is about to find, too, and can tell better.
  constexpr double grace_seconds = 2;
  if (const int rank = context_.first_with(Fate::failed); rank >= 0 && seconds_since(waiting_since) > grace_seconds)
    throw Error(plan.describe(tensor) + ": rank " + std::to_string(rank) + " met an error, which it tells of itself.");
  if (context_.first_with(Fate::left) < 0) return;
  for (const int rank : plan.missing_ranks(tensor)) {
    const auto& local = topology().local_ranks();
    const auto found = std::find(local.begin(), local.end(), rank);
    if (found != local.end() && context_.bells[found - local.begin()].fate == Fate::left)
      throw Error(plan.describe(tensor) + ": rank " + std::to_string(rank) +
                  " has already left the job (it called finalize or reached the end of its script) while this rank " +
                  "waits for it. Do all ranks run the same number of steps?");
  }
}

void Team::leave() {
  context_.my_bell().fate = Fate::left;
  context_.ring_node();
}

void Team::allreduce(void* data, int64_t count, DType dtype, Op op, std::optional<DType> wire, std::optional<Path> path,
                     const std::string& what, const std::vector<int64_t>& shape) {
  if (topology().size == 1) return;
  const bool mean = op == Op::mean;
  if (mean && (dtype == DType::int32 || dtype == DType::int64))
    throw Error("The mean of integers is not an integer. Expected op sum, min or max.");
  throw_if_failed();
  try {
    ++activity_.calls;
    allreduce_->run(data, static_cast<size_t>(count), dtype, op, wire, path, tag_of(what, shape));
  } catch (const Disagreement& e) {  // on all ranks, before any data moved: the team can go on
    explain("\n" + (what.empty() ? "allreduce" : what) + ": " + e.mine + text_of(shape), e);
  } catch (const std::exception& e) {
    fail(std::current_exception(), e.what());
    throw;
  }
}

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
