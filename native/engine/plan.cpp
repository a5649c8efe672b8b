// SPDX-License-Identifier: Apache-2.0
#include "engine/plan.hpp"

#include <algorithm>
#include <cstring>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/area.hpp"
#include "engine/trace.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kPage = 4096;
size_t pages(size_t nbytes) {
  return (nbytes + kPage - 1) / kPage * kPage;
}

// Reductions across nodes that one lane keeps on the way for one plan.
constexpr int kInFlight = 4;
// Point-to-point tags: each plan has a block of them, one per bucket on the way and one for the weights. Plans further
// apart than kTagBlocks share a block, which would matter only if both ran at the same time. MPI promises 32,767 tags.
constexpr int kTagsPerPlan = 8;
constexpr int kTagBlocks = 4000;
constexpr int kHeaderPlace = kInFlight;
// Copies bypass the caches when a step's tensors would not stay in them anyway.
constexpr size_t kStreamingBytes = size_t{8} << 20;

}  // namespace

struct Plan::Counter {
  alignas(64) std::atomic<uint64_t> value;
};

struct alignas(128) Plan::Shared {
  std::atomic<uint64_t> consumed;  // executions whose results this rank has copied out
  double weight;                   // of the current execution; written before `packed` is raised
};

Plan::Plan(const TeamContext& team, int number, std::string name, std::vector<TensorSpec> tensors, Op op, bool weighted,
           int lanes, std::optional<DType> wire, bool in_segment, const AlgorithmFor& algorithm_for,
           Transport& transport, Channel& control)
    : team_(team),
      topology_(*team.topology),
      number_(number),
      name_(std::move(name)),
      tensors_(std::move(tensors)),
      op_(op),
      weighted_(weighted && op == Op::mean),
      wire_(wire),
      layout_(tensors_, lanes),
      in_segment_(in_segment),
      data_(tensors_.size()),
      states_(tensors_.size()),
      unpacked_tensors_(layout_.buckets().size()),
      is_packed_(layout_.buckets().size()),
      packed_front_(at(lanes)),
      lanes_(at(lanes)) {
  for (int t = 0; t < layout_.tensor_count(); ++t) tensor_bytes_ += layout_.range(t).size();
  for (const TensorSpec& tensor : tensors_)
    if (op == Op::mean && (tensor.dtype == DType::int32 || tensor.dtype == DType::int64))
      throw Error("The mean of integers is not an integer. Expected op sum, min or max for '" + tensor.name + "'.");
  for (const Bucket& bucket : layout_.buckets()) {
    int held = 0;
    for (int t = bucket.first; t <= bucket.last; ++t) held += !layout_.part(t, {bucket.begin, bucket.end}).empty();
    tensors_in_bucket_.push_back(held);
  }
  if (topology_.size == 1 && !in_segment) return;  // the result is the tensor
  if (topology_.node_count > 1)
    for (const Bucket& bucket : layout_.buckets())
      algorithms_.push_back(algorithm_for((bucket.end - bucket.begin) / at(topology_.owners)));
  const auto local = at(topology_.local_size());
  const size_t control_bytes = pages(local * sizeof(Shared) + 2 * at(lanes) * local * sizeof(Counter));
  const size_t slots = in_segment ? local : std::max<size_t>(1, local - 1);
  const size_t stride = in_segment ? Area::stride_for(layout_.nbytes()) : pages(layout_.nbytes());
  segment_ = transport.open_segment(control, control_bytes + slots * stride);
  shared_ = reinterpret_cast<Shared*>(segment_->data());
  packed_ = reinterpret_cast<Counter*>(shared_ + local);
  reduced_ = packed_ + at(lanes) * local;
  slots_ = segment_->data() + control_bytes;
  streaming_ = layout_.nbytes() >= kStreamingBytes;
}

// ---- the execution, from the threads of the framework

bool Plan::start(int tensor, void* data, double weight) {
  if (!active_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex_);
    if (!active_.load(std::memory_order_relaxed)) begin(weight);
  }
  State idle = State::idle;
  if (!states_[at(tensor)].compare_exchange_strong(idle, State::started, std::memory_order_acq_rel))
    throw Error(describe(tensor) + " was started twice without a wait in between.");
  data_[at(tensor)] = static_cast<std::byte*>(data);
  if (in_segment_ && data != memory_of(topology_.local_rank) + layout_.range(tensor).begin)
    throw Error(describe(tensor) + " lives in the plan's own memory, and no other can be started.");
  return topology_.size > 1 && pack(tensor);
}

void Plan::begin(double weight) {
  if (topology_.size > 1 && !in_segment_) {
    // Peers may still be copying the previous results out of the memory that is now written to.
    const uint64_t previous = step_;
    const auto missing = [&] {
      std::vector<int> ranks;
      for (int r = 0; r < topology_.local_size(); ++r)
        if (shared_[r].consumed.load(std::memory_order_seq_cst) < previous)
          ranks.push_back(topology_.local_ranks()[at(r)]);
      return ranks;
    };
    const auto stall = [&] { return Stall{what(), previous, "", -1, missing}; };
    if (!wait_watched(team_, [&] { return missing().empty(); }, [] { return false; }, stall))
      throw Timeout("A rank of this node did not finish step " + std::to_string(previous) + " of plan '" + name_ +
                    "' within the time limit.");
  }
  if (topology_.size > 1) shared_[topology_.local_rank].weight = weight;
  for (size_t b = 0; b < layout_.buckets().size(); ++b) {
    unpacked_tensors_[b].store(tensors_in_bucket_[b], std::memory_order_relaxed);
    is_packed_[b] = 0;
  }
  std::fill(packed_front_.begin(), packed_front_.end(), 0);
  for (auto& state : states_) state.store(State::idle, std::memory_order_relaxed);
  finished_.store(0, std::memory_order_relaxed);
  began_at_.store(Clock::now(), std::memory_order_relaxed);
  note_reduced(began_at_);
  step_.fetch_add(1, std::memory_order_seq_cst);
  active_.store(true, std::memory_order_release);
}

bool Plan::pack(int tensor) {
  bool completed = false;
  const auto [first, last] = layout_.buckets_of(tensor);
  const int me = topology_.local_rank;
  for (int b = first; b < last; ++b) {
    const Bucket& bucket = layout_.buckets()[at(b)];
    for (int owner = 0; owner < topology_.owners; ++owner) {
      if (owner == me || in_segment_) continue;
      const Range part = layout_.part(tensor, Layout::slice(bucket, owner, topology_.owners));
      if (part.empty()) continue;
      std::byte* to = slot(owner, me) + part.begin;
      const std::byte* from = data_[at(tensor)] + (part.begin - layout_.range(tensor).begin);
      if (streaming_)
        copy_streaming(to, from, part.size());
      else
        copy_shared(to, from, part.size());
    }
    if (unpacked_tensors_[at(b)].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    bucket_is_packed(b);
    completed = true;
  }
  return completed;
}

void Plan::bucket_is_packed(int b) {
  {
    const std::lock_guard lock(pack_mutex_);
    is_packed_[at(b)] = 1;
    const int lane = layout_.buckets()[at(b)].lane;
    const auto& buckets = layout_.buckets_of_lane(lane);
    size_t& front = packed_front_[at(lane)];
    const size_t before = front;
    while (front < buckets.size() && is_packed_[at(buckets[front])]) ++front;
    if (front == before) return;
    packed_[at(lane * topology_.local_size() + topology_.local_rank)].value.store((step_ - 1) * buckets.size() + front,
                                                                                  std::memory_order_seq_cst);
  }
  team_.ring_node();
}

uint64_t Plan::target(const Bucket& bucket) const {
  return (step_ - 1) * layout_.buckets_of_lane(bucket.lane).size() + static_cast<uint64_t>(bucket.number) + 1;
}

void Plan::check_started(int tensor) const {
  if (states_[at(tensor)].load(std::memory_order_acquire) != State::started)
    throw Error(describe(tensor) + " was waited for but not started.");
}

bool Plan::is_reduced(int tensor) const {
  if (topology_.size == 1) return true;
  const auto [first, last] = layout_.buckets_of(tensor);
  for (int b = first; b < last; ++b) {
    const Bucket& bucket = layout_.buckets()[at(b)];
    const Counter* reduced = reduced_ + at(bucket.lane * topology_.local_size());
    for (int owner = 0; owner < topology_.owners; ++owner)
      if (reduced[owner].value.load(std::memory_order_seq_cst) < target(bucket)) return false;
  }
  return true;
}

void Plan::finish(int tensor) {
  if (topology_.size > 1 && !in_segment_) {
    const auto [first, last] = layout_.buckets_of(tensor);
    for (int b = first; b < last; ++b)
      for (int owner = 0; owner < topology_.owners; ++owner) {
        if (owner == topology_.local_rank) continue;
        const Range part = layout_.part(tensor, Layout::slice(layout_.buckets()[at(b)], owner, topology_.owners));
        if (part.empty()) continue;
        const int result = topology_.local_size() > 1 ? (owner + 1) % topology_.local_size() : 0;
        copy_shared(data_[at(tensor)] + (part.begin - layout_.range(tensor).begin), slot(owner, result) + part.begin,
                    part.size());
      }
  }
  states_[at(tensor)].store(State::finished, std::memory_order_release);
  if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 < layout_.tensor_count()) return;
  totals_.count(tensor_bytes_, std::chrono::duration<double>(reduced_at_.load() - began_at_.load()).count());
  if (topology_.size > 1) shared_[topology_.local_rank].consumed.store(step_, std::memory_order_seq_cst);
  active_.store(false, std::memory_order_release);
  if (topology_.size > 1) team_.ring_node();
}

// ---- reduction, from whichever thread holds the lane

// What contributor `r` sends to `owner` lies in slot (r - owner - 1) mod L; the result overwrites slot 0.
std::byte* Plan::slot(int owner, int contributor) const {
  const int local = topology_.local_size();
  const int index = local > 1 ? (contributor - owner - 1 + local) % local : 0;
  return slots_ + at(index) * pages(layout_.nbytes());
}

std::byte* Plan::memory_of(int local_rank) const {
  return slots_ + at(local_rank) * Area::stride_for(layout_.nbytes());
}

std::byte* Plan::own_result() const {
  const int me = topology_.local_rank;
  return in_segment_ ? memory_of(me) : slot(me, (me + 1) % topology_.local_size());
}

std::shared_ptr<std::byte> Plan::memory() const {
  if (!in_segment_) throw Error("The tensors of plan '" + name_ + "' do not live in its segment.");
  return {segment_, memory_of(topology_.local_rank)};
}

int Plan::network_tag(int place) const {
  return (number_ % kTagBlocks) * kTagsPerPlan + place;
}

bool Plan::advance(int lane_number, Channel& channel) {
  if (topology_.size == 1 || topology_.local_rank >= topology_.owners) return false;
  LaneState& lane = lanes_[at(lane_number)];
  const auto& buckets = layout_.buckets_of_lane(lane_number);
  bool advanced = false;
  while (!buckets.empty() && lane.operations.size() < kInFlight) {
    const Counter* packed = packed_ + at(lane_number * topology_.local_size());
    bool ready = true;
    for (int r = 0; r < topology_.local_size() && ready; ++r)
      ready = packed[r].value.load(std::memory_order_seq_cst) > lane.next;
    if (!ready || !know_weights(lane, lane.next / buckets.size() + 1, channel)) break;
    const int b = buckets[lane.next % buckets.size()];
    const Bucket& bucket = layout_.buckets()[at(b)];
    const auto begin = Clock::now();
    reduce(bucket, lane);
    if (trace::enabled) trace::record(name_ + "/" + std::to_string(b), "reduce", team_.number, begin);
    if (topology_.node_count == 1) {
      publish(lane_number);
    } else {
      const Range slice = Layout::slice(bucket, topology_.local_rank, topology_.owners);
      std::unique_ptr<Allreduce> operation;
      if (!slice.empty())
        operation =
            make_allreduce(algorithms_[at(b)],
                           {channel, topology_.peers_of_slice(topology_.local_rank), topology_.node,
                            own_result() + slice.begin, slice.size() / size_of(bucket.dtype), bucket.dtype,
                            wire_.value_or(bucket.dtype), op_, network_tag(static_cast<int>(lane.next % kInFlight))});
      lane.operations.push_back({b, std::move(operation), Clock::now()});
      lane.in_flight.store(static_cast<int>(lane.operations.size()), std::memory_order_relaxed);
    }
    ++lane.next;
    advanced = true;
  }
  for (InFlight& f : lane.operations) {
    if (!f.operation || !f.operation->advance()) continue;
    f.operation.reset();
    const Bucket& bucket = layout_.buckets()[at(f.bucket)];
    copy_result(bucket, Layout::slice(bucket, topology_.local_rank, topology_.owners));
    if (trace::enabled) trace::record(name_ + "/" + std::to_string(f.bucket), "network", team_.number, f.begin);
  }
  while (!lane.operations.empty() && !lane.operations.front().operation) {
    publish(lane_number);
    lane.operations.pop_front();
    lane.in_flight.store(static_cast<int>(lane.operations.size()), std::memory_order_relaxed);
    advanced = true;
  }
  return advanced;
}

// The weights of an execution: on this node they lie in the segment; from other nodes they come in one small message.
bool Plan::know_weights(LaneState& lane, uint64_t step, Channel& channel) {
  if (lane.headers_step == step) return true;
  const auto size = at(topology_.size);
  if (!lane.header_exchange) {
    lane.headers.assign(size, 0.0);
    for (int r = 0; r < topology_.local_size(); ++r)
      lane.headers[at(topology_.local_ranks()[at(r)])] = shared_[r].weight;
  }
  if (topology_.node_count > 1 && weighted_) {
    if (!lane.header_exchange) {
      lane.header_exchange =
          make_allreduce(Algorithm::recursive_doubling,
                         {channel, topology_.peers_of_slice(topology_.local_rank), topology_.node, lane.headers.data(),
                          lane.headers.size(), DType::float64, DType::float64, Op::sum, network_tag(kHeaderPlace)});
      lane.in_flight.fetch_add(1);
    }
    if (!lane.header_exchange->advance()) return false;
    lane.header_exchange.reset();
    lane.in_flight.store(static_cast<int>(lane.operations.size()), std::memory_order_relaxed);
  }
  lane.weights = find_weights(op_, weighted_, lane.headers, topology_.local_ranks());
  lane.headers_step = step;
  return true;
}

void Plan::reduce(const Bucket& bucket, const LaneState& lane) {
  const int me = topology_.local_rank;
  const int local = topology_.local_size();
  const Range slice = Layout::slice(bucket, me, topology_.owners);
  std::vector<Source> sources;
  sources.reserve(at(local));
  std::vector<void*> outs;
  outs.reserve(at(local));
  for (int t = bucket.first; t <= bucket.last; ++t) {
    const Range part = layout_.part(t, slice);
    if (part.empty()) continue;
    std::byte* mine = data_[at(t)] + (part.begin - layout_.range(t).begin);
    sources.clear();
    outs.clear();
    for (int r = 0; r < local; ++r) {
      std::byte* theirs = r == me ? mine : (in_segment_ ? memory_of(r) : slot(me, r)) + part.begin;
      if (in_segment_ && r != me) outs.push_back(theirs);
      const double factor = lane.weights.weighted ? lane.weights.factors[at(r)] : 1.0;
      if (factor == 0.0) continue;  // has no samples in this step; its values may be NaN
      sources.push_back({theirs, factor});
    }
    if (!in_segment_) outs.push_back(own_result() + part.begin);
    // Across nodes, first only where the network takes it from.
    if (topology_.node_count > 1) outs.clear();
    outs.push_back(topology_.node_count > 1 ? own_result() + part.begin : mine);
    keras_hpc::reduce(bucket.dtype, op_, sources.data(), sources.size(), lane.weights.weighted, lane.weights.scale,
                      outs.data(), outs.size(), part.size() / size_of(bucket.dtype));
  }
}

void Plan::copy_result(const Bucket& bucket, const Range& slice) {
  if (in_segment_) {
    for (int r = 0; r < topology_.local_size(); ++r)
      if (r != topology_.local_rank) copy_shared(memory_of(r) + slice.begin, own_result() + slice.begin, slice.size());
    return;
  }
  for (int t = bucket.first; t <= bucket.last; ++t) {
    const Range part = layout_.part(t, slice);
    if (!part.empty())
      std::memcpy(data_[at(t)] + (part.begin - layout_.range(t).begin), own_result() + part.begin, part.size());
  }
}

void Plan::publish(int lane_number) {
  LaneState& lane = lanes_[at(lane_number)];
  reduced_[at(lane_number * topology_.local_size() + topology_.local_rank)].value.store(++lane.published,
                                                                                        std::memory_order_seq_cst);
  if (lane.published % layout_.buckets_of_lane(lane_number).size() == 0) note_reduced(Clock::now());
  team_.ring_node();
}

// ---- the rest

std::vector<int> Plan::missing_ranks(int tensor) const {
  std::vector<int> missing;
  const auto [first, last] = layout_.buckets_of(tensor);
  for (int r = 0; r < topology_.local_size(); ++r)
    for (int b = first; b < last; ++b) {
      const Bucket& bucket = layout_.buckets()[at(b)];
      const Counter& packed = packed_[bucket.lane * topology_.local_size() + r];
      if (packed.value.load(std::memory_order_seq_cst) >= target(bucket)) continue;
      missing.push_back(topology_.local_ranks()[at(r)]);
      break;
    }
  if (!missing.empty()) return missing;
  for (const auto& ranks : topology_.ranks_of_node)  // this node is complete: somebody on another one is late
    if (&ranks != &topology_.local_ranks()) missing.insert(missing.end(), ranks.begin(), ranks.end());
  return missing;
}

std::string Plan::describe(int tensor) const {
  return "Tensor '" + tensors_[at(tensor)].name + "' of plan '" + name_ + "' (team " + std::to_string(team_.number) +
         ", step " + std::to_string(step()) + ", rank " + std::to_string(topology_.rank) + ")";
}

PlanProgress Plan::progress() const {
  PlanProgress progress{what(), step(), {}};
  for (int t = 0; active_ && t < layout_.tensor_count(); ++t)
    if (states_[at(t)] == State::idle) progress.not_started.push_back(t);
  return progress;
}

}  // namespace keras_hpc
