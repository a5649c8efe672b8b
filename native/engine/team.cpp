// SPDX-License-Identifier: Apache-2.0
#include "engine/team.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <system_error>

#include "common/error.hpp"
#include "common/index.hpp"
#include "common/seat.hpp"
#include "engine/trace.hpp"

namespace keras_hpc {

Team::Team(std::unique_ptr<Transport> transport, int number, const TeamOptions& options)
    : transport_(std::move(transport)),
      options_(options),
      control_(transport_->open_channel()),
      activity_(options.stall_seconds) {
  Pending::free_finished();  // of teams before that have failed
  transport_->set_time_limit(options.timeout_seconds);
  const auto local = at(topology().local_size());
  constexpr int kinds = 3;  // of bells: see TeamContext
  bells_ = transport_->open_segment(*control_, local * (kinds * sizeof(Bell) + sizeof(Seat)));
  auto* bells = reinterpret_cast<Bell*>(bells_->data());
  bells[topology().local_rank].process = ProcessId::mine();
  failure_.emplace(topology(), bells, kinds, options.grace_seconds);
  context_.number = number;
  context_.topology = &topology();
  context_.bells = bells;
  context_.callers = bells + local;
  context_.exchangers = bells + 2 * local;
  context_.timeout_seconds = options_.timeout_seconds;
  context_.stall_seconds = options_.stall_seconds;
  context_.activity = &activity_;
  context_.failure = &*failure_;
  context_.asynchronous_waits = &asynchronous_waits_;
  // Whoever fails here has not done what the others have, on channels of all.
  transport_->set_waiting([this](const auto& ready) { wait_for_memory(ready); });
  auto* seats = reinterpret_cast<Seat*>(bells + kinds * local);
  seats[topology().local_rank] = Seat::mine();
  barrier();
  context_.patience = options_.patience.value_or(patience_of(seats, topology().local_size()));
  for (int i = 0; i < std::max(1, options_.threads); ++i) {
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->channel = transport_->open_channel();
    context_.active_plans.push_back(&lanes_.back()->plans);
  }
  if (topology().node_count > 1)
    failure_->listen(transport_->open_channel(), transport_->open_links(*control_, News::told_by(topology())));
  allreduce_ = std::make_unique<AllreduceCall>(context_, *transport_, *control_);
  if (topology().size == 1) options_.threads = 0;  // nothing to communicate
  try {
    for (int i = 0; i < options_.threads; ++i) lanes_[at(i)]->thread = std::thread([this, i] { serve(i); });
  } catch (const std::system_error& e) {
    const Error error(std::string("Cannot start a communication thread: ") + e.what() +
                      ". A limit on the number of processes (ulimit -u, pids.max of a container) counts threads, too.");
    fail(std::make_exception_ptr(error));  // the other ranks learn of it when they need this one
    join_threads();
    throw error;
  }
}

void Team::set_time_limit(double seconds) {
  context_.timeout_seconds = options_.timeout_seconds = seconds;
  transport_->set_time_limit(seconds);
}

Team::~Team() {
  close();
}

void Team::close() {
  for (const auto& lane : lanes_)
    if (lane->thread.get_id() == std::this_thread::get_id())
      throw Error("A team cannot be closed by its own communication thread, from inside `done`.");
  failure_->close();
  withdraw("The team was closed.");
  join_threads();
  failure_->stop_listening();
}

void Team::join_threads() {
  const std::lock_guard lock(closing_mutex_);
  end_attendants(nullptr);
  stopping_ = true;
  context_.my_bell().ring();
  for (auto& lane : lanes_)
    if (lane->thread.joinable()) lane->thread.join();
}

// ---- errors

void Team::fail(std::exception_ptr error) {
  error = failure_->explained(std::move(error));
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    text = e.what();
  }
  transport_->abandon();
  failure_->set(std::move(error));
  withdraw(text.c_str());
}

void Team::fail_and_throw() {
  fail(std::current_exception());
  try {
    throw;
  } catch (const NetworkError&) {  // others may know better
    failure_->throw_if_set();
    throw;
  }
}

// There is an error: when it returns nobody works on any lane any more.
void Team::await_lanes() const {
  for (const auto& lane : lanes_) const std::lock_guard lock(lane->mutex);
}

void Team::throw_if_failed() const {
  if (!failure_->is_set()) return;
  await_lanes();
  failure_->throw_if_set();
}

void Team::withdraw(const char* why) {
  await_lanes();
  if (Exchanges* exchanges = exchanges_of_all_) exchanges->withdraw();
  std::vector<AsyncWait> waiting;
  {
    const std::lock_guard lock(async_mutex_);
    waiting.swap(async_);
    asynchronous_waits_ = 0;
  }
  for (const AsyncWait& wait : waiting) wait.done(wait.arg, why);
}

// ---- plans

// Makes something in shared memory. Where that fails, it fails on all ranks, and the team goes on; unless a rank never
// comes, or fails alone, as one that MPI or its own memory lets down.
template <class F>
auto Team::sharing(F&& f) -> decltype(f()) {
  const std::lock_guard lock(control_mutex_);
  throw_if_failed();
  try {
    return f();
  } catch (const Timeout&) {
    fail_and_throw();
  } catch (const NetworkError&) {
    fail_and_throw();
  } catch (const Error&) {  // all ranks have it, or it is the team's already
    throw;
  } catch (const std::exception&) {
    fail_and_throw();
  }
}

std::shared_ptr<Plan> Team::make_plan(const std::string& name, const std::vector<TensorSpec>& tensors,
                                      const PlanOptions& options) {
  if (tensors.empty()) throw Error("Plan '" + name + "' has no tensors.");
  std::vector<std::string> items;
  items.push_back(std::string(name_of(options.op)) + (options.weighted ? ", weighted" : "") +
                  (options.wire ? std::string(", sent as ") + name_of(*options.wire) : "") +
                  (options.in_segment ? ", in the segment" : "") + (options.in_tree ? ", in the order of a tree" : "") +
                  (options.bucket_bytes > 0 ? ", buckets of " + std::to_string(options.bucket_bytes) + " bytes" : ""));
  for (size_t t = 0; t < tensors.size(); ++t) {
    std::string& item = items.emplace_back(tensors[t].name + ": " + std::to_string(tensors[t].count) + " x " +
                                           name_of(tensors[t].dtype));
    if (t < options.givers.size()) item += " from rank " + std::to_string(options.givers[t]);
    if (t < options.takers.size())
      for (const Share& share : options.takers[t])
        item += ", to rank " + std::to_string(share.rank) + " up to " + std::to_string(share.end);
  }
  agree("The tensors of plan '" + name + "'", items);
  // A measurement that fails may do so on this rank alone.
  const auto algorithm_for = [this](size_t nbytes) {
    return guarded([&] { return allreduce_->algorithm_for(nbytes, true); });
  };
  const auto plan = sharing([&] {
    return std::make_shared<Plan>(context_, next_plan_++, name, tensors, options, static_cast<int>(lanes_.size()),
                                  algorithm_for, *transport_, *control_);
  });
  const std::lock_guard lock(plans_mutex_);
  plans_.push_back(plan);
  return plan;
}

std::shared_ptr<Pipeline> Team::make_pipeline(Plan& plan) {
  const std::lock_guard lock(plans_mutex_);
  return pipelines_.emplace_back(std::make_shared<Pipeline>(*this, plan));
}

std::shared_ptr<LocalSteps> Team::make_local_steps(Plan& plan, const LocalOptions& options) {
  const std::lock_guard lock(plans_mutex_);
  return local_steps_.emplace_back(std::make_shared<LocalSteps>(*this, plan, options));
}

void Team::attach(std::shared_ptr<Attendant> attendant) {
  const std::lock_guard lock(plans_mutex_);
  attendants_.push_back(std::move(attendant));
}

void Team::end_attendants(const Plan* plan) {
  std::vector<std::shared_ptr<Attendant>> ending;
  {
    const std::lock_guard lock(plans_mutex_);
    const auto others = std::partition(attendants_.begin(), attendants_.end(), [&](const auto& attendant) {
      return plan != nullptr && !attendant->is_of(*plan);
    });
    ending.assign(others, attendants_.end());
    attendants_.erase(others, attendants_.end());
  }
  for (const auto& attendant : ending) attendant->stop();
}

int Team::make_exchange(const ExchangeSpec& spec, const std::string& terms) {
  spec.check(topology().rank, topology().size);
  agree("The rows of exchange '" + spec.name + "'", {terms});
  sharing([&] {
    if (exchanges_) return;
    exchanges_ = std::make_unique<Exchanges>(context_, *transport_);
    exchanges_of_all_ = exchanges_.get();
  });
  const auto mine = static_cast<int64_t>(exchanges_->new_neighbours(spec).size());
  const std::vector<int64_t> of_ranks = allgather_count(mine);
  const auto most = static_cast<size_t>(*std::max_element(of_ranks.begin(), of_ranks.end()));
  return sharing([&] { return exchanges_->add(spec, most, *transport_, *control_); });
}

const ExchangeSpec& Team::exchange(int number) const {
  const Exchanges* exchanges = exchanges_of_all_;
  if (exchanges == nullptr) throw Error("The team has no exchanges.");
  return exchanges->spec(number);
}

void Team::start_exchange(int number, const ExchangeShape& shape, const void* data) {
  exchange(number);
  guarded([&] { exchanges_->start(number, shape, data); });
}

void Team::wait_exchange(int number, bool adjoint, void* result) {
  exchange(number);
  const auto begin = Clock::now();
  guarded([&] { exchanges_->wait(number, adjoint, result); });
  if (trace::enabled)
    trace::record(exchange(number).name, adjoint ? "exchange backward" : "exchange", this->number(), begin);
}

std::shared_ptr<Area> Team::make_area(size_t nbytes) {
  return sharing([&] { return allreduce_->make_area(*control_, nbytes); });
}

void Team::end_plan(Plan& plan) {
  throw_if_failed();
  if (plan.is_active()) throw Error(plan.what() + " cannot end: a step of it has begun and is not over.");
  end_attendants(&plan);
  std::vector<std::unique_lock<std::mutex>> held;  // so no lane works on it
  for (const auto& lane : lanes_) held.emplace_back(lane->mutex);
  const std::lock_guard lock(plans_mutex_);
  const PlanTotals totals = plan.totals();
  ended_plans_.executions += totals.executions;
  ended_plans_.bytes += totals.bytes;
  ended_plans_.seconds += totals.seconds;
  for (const auto& lane : lanes_) {
    lane->plans.all();  // so that none waits to be taken
    lane->plans.remove_if([&](const Plan* other) { return other == &plan; });
  }
  pipelines_.erase(std::remove_if(pipelines_.begin(), pipelines_.end(), [&](const auto& p) { return p->is_of(plan); }),
                   pipelines_.end());
  local_steps_.erase(
      std::remove_if(local_steps_.begin(), local_steps_.end(), [&](const auto& l) { return l->is_of(plan); }),
      local_steps_.end());
  plans_.erase(std::remove_if(plans_.begin(), plans_.end(), [&](const auto& p) { return p.get() == &plan; }),
               plans_.end());
}

void Team::start(Plan& plan, int tensor, void* data, double weight) {
  throw_if_failed();
  const auto begin = trace::enabled ? Clock::now() : Clock::time_point();
  const Plan::Started started = plan.start(tensor, data, weight);
  if (trace::enabled) trace::record(plan.tensors()[at(tensor)].name, "start", number(), begin);
  // A small bucket is packed in less time than it takes to wake the thread. Where there is none, whoever starts a
  // tensor looks after what goes from node to node; which costs more than the start of a small tensor, if there is
  // nothing.
  const bool helps = options_.threads == 0
                         ? started != Plan::Started::nothing || (topology().node_count > 1 && is_under_way())
                         : started == Plan::Started::small_bucket;
  if (helps)
    guarded([this] { progress_all(); });
  else if (started == Plan::Started::bucket)
    context_.my_bell().ring();
}

// ---- progress

bool Team::progress(int lane_number) {
  Lane& lane = *lanes_[at(lane_number)];
  bool advanced = false;
  // Whoever finds somebody else at it leaves word, and that one looks again before it goes.
  for (lane.wanted = true; lane.wanted; std::atomic_thread_fence(std::memory_order_seq_cst)) {
    const std::unique_lock lock(lane.mutex, std::try_to_lock);
    if (!lock.owns_lock()) return advanced;
    lane.wanted = false;
    if (failure_->is_set() || lane.is_broken) return false;
    const auto begin = Clock::now();
    bool moved = false, under_way = false, busy = false;
    lane.is_broken = true;  // if an exception leaves the loop
    for (Plan* plan : lane.plans.all()) {
      moved = plan->advance(lane_number, *lane.channel) || moved;
      under_way = under_way || plan->is_under_way(lane_number);
      busy = busy || plan->uses_network(lane_number);
    }
    lane.is_broken = false;
    lane.is_under_way.store(under_way, std::memory_order_relaxed);
    lane.plans.remove_if([](const Plan* plan) { return !plan->is_active(); });
    // The lane's own thread looks after the network, and may have gone to sleep before this one sent something.
    if (!lane.network_is_busy.exchange(busy) && busy) context_.my_bell().ring();
    if (moved) add(progress_seconds_, seconds_since(begin));
    advanced = advanced || moved;
  }
  return advanced;
}

bool Team::progress_all() {
  bool advanced = false;
  for (int lane = 0; lane < static_cast<int>(lanes_.size()); ++lane) advanced = progress(lane) || advanced;
  return advanced;
}

bool Team::is_under_way() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return lane->is_under_way.load(std::memory_order_relaxed); });
}

void Team::serve(int lane) {
  prctl(PR_SET_NAME, ("khpc-" + std::to_string(number()) + "." + std::to_string(lane)).c_str());
  prctl(PR_SET_TIMERSLACK, 1);  // naps of microseconds, not of 50
  const auto ready = [&] {
    const bool advanced = progress(lane);
    return (lane == 0 && complete_async()) || advanced || stopping_;
  };
  Lookout lookout(*failure_);
  const auto look = [&] {
    failure_->throw_if_set();
    if (lane == 0) {
      lookout.look_around(true);
      look_after_async();
    }
    return lanes_[at(lane)]->network_is_busy.load();
  };
  try {
    while (!stopping_) guarded([&] { wait_for(context_.patience, context_.my_bell(), 3600, ready, look); });
  } catch (const std::exception&) {  // the team's: who uses it is told
  }
}

void Team::look_around() {
  if (options_.threads > 0 || failure_->is_set()) return;
  const std::lock_guard lock(looking_mutex_);
  if (!idle_lookout_) idle_lookout_.emplace(*failure_);
  try {
    idle_lookout_->look_around(false);
  } catch (const Error&) {
    fail(std::current_exception());
  }
}

void Team::leave() {
  failure_->leave();
}

}  // namespace keras_hpc
