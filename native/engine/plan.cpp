// SPDX-License-Identifier: Apache-2.0
#include "engine/plan.hpp"

#include <algorithm>
#include <cstring>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/trace.hpp"
#include "transport/pending.hpp"

namespace keras_hpc {
namespace {

// Point-to-point tags: each plan has a block of them. Plans further apart than kTagBlocks share a block, which would
// matter only if both ran at the same time. MPI promises 32,767 tags.
constexpr int kTagBlocks = 6000;
static_assert(kTagBlocks * LaneNetwork::kTags <= 32767);
// The tensors of a larger plan have left the processor's caches when they are copied to. (Writing past the caches is
// slower for less, and faster for 100 MB inside of a training step; measured on Intel Sapphire Rapids.)
constexpr size_t kStreamedBytes = 32 << 20;
constexpr size_t kFewBytes = 128 << 10;

// Of float16 a sum that has not been divided yet may be too large.
bool has_float16(const std::vector<TensorSpec>& tensors, std::optional<DType> wire) {
  return wire == DType::float16 || std::any_of(tensors.begin(), tensors.end(),
                                               [](const TensorSpec& tensor) { return tensor.dtype == DType::float16; });
}

// Between nodes a message that fits one frame takes two thirds of the time of one that does not. Whether all ranks need
// all or not: the bits of a sum depend on where in the buffer an element lies.
bool lie_side_by_side(const Topology& topology, const PlanOptions& options) {
  return topology.node_count > 1 && !options.in_segment;
}

// Of a plan across nodes that has few bytes, of all ranks of the largest node together, one rank a node alone is
// faster: the others need not be woken to send theirs. All nodes decide alike, whatever ranks they have themselves.
int owners_of(const Topology& topology, const Layout& layout) {
  const bool few = at(topology.largest_node) * layout.nbytes() <= kFewBytes;
  return topology.node_count > 1 && few ? 1 : topology.owners;
}

// Checks who alone gives or needs what, and says what that lets ranks of a single node own.
std::vector<std::vector<Run>> owned_alone(const PlanOptions& options, const std::vector<TensorSpec>& tensors,
                                          const Topology& topology, const std::string& name) {
  const std::vector<int>& givers = options.givers;
  check_shares(options.takers, tensors, topology, name);
  if (givers.empty()) return runs_of(options.takers, tensors, topology);
  if (options.op != Op::sum || options.wire || options.in_segment || givers.size() != tensors.size() ||
      !options.takers.empty())
    throw Error(
        "Expected a sum that is sent as it is to all, outside of the segment, and a giver for each tensor of '" + name +
        "'.");
  for (const int giver : givers)
    if (giver < 0 || giver >= topology.size) throw Error("The giver of a tensor is a rank of the team.");
  return runs_of(shares_of(givers, tensors), tensors, topology);
}

}  // namespace

Plan::Plan(const TeamContext& team, int number, std::string name, std::vector<TensorSpec> tensors,
           const PlanOptions& options, int lanes, const AlgorithmFor& algorithm_for, Transport& transport,
           Channel& control)
    : team_(team),
      topology_(*team.topology),
      number_(number),
      name_(std::move(name)),
      tensors_(std::move(tensors)),
      op_(options.op),
      weighted_(options.weighted && op_ == Op::mean),
      in_tree_(options.in_tree),
      wire_(options.wire),
      givers_(options.givers),
      divides_late_(weighted_ && topology_.node_count > 1 && !has_float16(tensors_, wire_)),
      layout_(tensors_, lanes, BucketBytes::of(topology_, options.bucket_bytes),
              owned_alone(options, tensors_, topology_, name_), lie_side_by_side(topology_, options)),
      flow_(!options.takers.empty() ? Flow::to_takers
            : givers_.empty()       ? Flow::to_all
                                    : Flow::from_givers),
      portions_(
          portions_of(givers_.empty() ? options.takers : shares_of(givers_, tensors_), tensors_, layout_, topology_)),
      owners_(owners_of(topology_, layout_)),
      in_segment_(options.in_segment),
      data_(tensors_.size()),
      states_(tensors_.size()),
      unstarted_(layout_.buckets().size()),
      lanes_(at(lanes)) {
  if (!givers_.empty()) layout_.alternate_owners();
  if (in_tree_) check_tree(options);
  for (int t = 0; t < layout_.tensor_count(); ++t) tensor_bytes_ += layout_.range(t).size();
  if (tensor_bytes_ > kStreamedBytes) copy_tensor_ = copy_streaming;
  for (const TensorSpec& tensor : tensors_)
    if (op_ == Op::mean && (tensor.dtype == DType::int32 || tensor.dtype == DType::int64))
      throw Error("The mean of integers is not an integer. Expected op sum, min or max for '" + tensor.name + "'.");
  for (const Bucket& bucket : layout_.buckets()) {
    int held = 0;
    for (int t = bucket.first; t <= bucket.last; ++t) held += !layout_.part(t, {bucket.begin, bucket.end}).empty();
    tensors_in_bucket_.push_back(held);
  }
  if (topology_.size == 1 && !in_segment_) return;  // the result is the tensor
  if (topology_.node_count > 1)
    for (const Bucket& bucket : layout_.buckets())
      algorithms_.push_back(in_tree_ ? Algorithm::pairwise : algorithm_for((bucket.end - bucket.begin) / at(owners_)));
  for (const Bucket& bucket : layout_.buckets()) largest_bucket_ = std::max(largest_bucket_, bucket.end - bucket.begin);
  for (int lane = 0; lane < lanes; ++lane) {
    lanes_[at(lane)].number = lane;
    if (in_segment_ && topology_.node_count > 1)
      lanes_[at(lane)].sums = message_memory(LaneNetwork::kInFlight * sum_stride());
    for (const int bucket : layout_.buckets_of_lane(lane))
      if (!algorithms_.empty() && algorithms_[at(bucket)] == Algorithm::library && !lanes_[at(lane)].mpi_channel)
        lanes_[at(lane)].mpi_channel = transport.open_library_channel();
  }
  memory_.emplace(team, layout_, owners_, lanes, in_segment_, transport, control);
}

// ---- the execution, from the threads of the framework

Plan::Started Plan::start(int tensor, void* data, double weight) {
  if (phase_.load(std::memory_order_acquire) != Phase::active) {
    const std::lock_guard lock(mutex_);
    if (phase_.load(std::memory_order_relaxed) != Phase::active) begin(weight);
  }
  State idle = State::idle;
  if (!states_[at(tensor)].compare_exchange_strong(idle, State::started, std::memory_order_acq_rel))
    throw Error(describe(tensor) + " was started twice without a wait in between.");
  std::byte*& place = data_[at(tensor)];
  place = static_cast<std::byte*>(data);
  if (in_segment_) {
    place = memory_->tensors_of(topology_.local_rank) + layout_.range(tensor).begin;
    if (place != data) copy_tensor_(place, data, layout_.range(tensor).size());
  }
  Started started = Started::nothing;
  if (topology_.size == 1) return started;
  const auto [first, last] = layout_.buckets_of(tensor);
  for (int b = first; b < last; ++b)
    if (unstarted_[at(b)].fetch_sub(1, std::memory_order_seq_cst) == 1)
      started = memory_->is_small(layout_.buckets()[at(b)]) && started != Started::bucket ? Started::small_bucket
                                                                                          : Started::bucket;
  return started;
}

void Plan::begin(double weight) {
  // All ranks have begun the execution before, and so have read the weight of the one before that.
  if (topology_.size > 1) memory_->weight_of(topology_.local_rank, step() + 1) = weight;
  for (size_t b = 0; b < layout_.buckets().size(); ++b)
    unstarted_[b].store(tensors_in_bucket_[b], std::memory_order_relaxed);
  for (auto& state : states_) state.store(State::idle, std::memory_order_relaxed);
  finished_.store(0, std::memory_order_relaxed);
  began_at_.store(Clock::now(), std::memory_order_relaxed);
  note_complete(began_at_);
  step_.fetch_add(1, std::memory_order_seq_cst);
  // In this order: a lane that has taken it from the list does not find it over, and drop it.
  phase_.store(Phase::beginning, std::memory_order_release);
  if (topology_.size > 1)
    for (ActivePlans* lane : team_.active_plans) lane->add(this);
  phase_.store(Phase::active, std::memory_order_release);
}

void Plan::check_started(int tensor) const {
  if (states_[at(tensor)].load(std::memory_order_acquire) != State::started)
    throw Error(describe(tensor) + " was waited for but not started.");
}

uint64_t Plan::target(const Bucket& bucket) const {
  return (step_ - 1) * layout_.buckets_of_lane(bucket.lane).size() + static_cast<uint64_t>(bucket.number) + 1;
}

bool Plan::is_complete(int tensor) const {
  if (topology_.size == 1) return true;
  const auto [first, last] = layout_.buckets_of(tensor);
  for (int b = first; b < last; ++b) {
    const Bucket& bucket = layout_.buckets()[at(b)];
    if (memory_->count(Stage::copied, bucket.lane, topology_.local_rank) < target(bucket)) return false;
  }
  return true;
}

int Plan::first_incomplete(int from) const {
  while (from < layout_.tensor_count() && is_complete(from)) ++from;
  return from;
}

void Plan::release(int tensor) {
  states_[at(tensor)].store(State::finished, std::memory_order_release);
  if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 < layout_.tensor_count()) return;
  totals_.count(tensor_bytes_, std::chrono::duration<double>(complete_at_.load() - began_at_.load()).count());
  phase_.store(Phase::over, std::memory_order_release);
}

// ---- a lane's work, from whichever thread holds it

bool Plan::advance(int lane_number, Channel& channel) {
  if (topology_.size == 1 || layout_.buckets_of_lane(lane_number).empty()) return false;
  LaneState& lane = lanes_[at(lane_number)];
  bool advanced = false;
  for (bool more = true; more && !team_.failure->is_set(); advanced = advanced || more) {
    more = copy_next(lane);  // first, because it makes room
    more = pack_next(lane) || more;
    more = reduce_next(lane, channel) || more;
    more = drive_network(lane) || more;
  }
  return advanced;
}

bool Plan::next_is_started(const LaneState& lane) const {
  if (lane.packed >= step_ * layout_.buckets_of_lane(lane.number).size()) return false;  // of the next execution
  return unstarted_[at(memory_->turn(lane.number, lane.packed).index)].load(std::memory_order_seq_cst) == 0;
}

// Copies what others own of the next bucket into the segment, or all of a small one, once its tensors have been started
// and its place is free.
bool Plan::pack_next(LaneState& lane) {
  if (!next_is_started(lane)) return false;
  const Turn next = memory_->turn(lane.number, lane.packed);
  if (!memory_->has_place(lane.number, lane.packed)) return false;
  const auto pack = [&](const Range& range, std::byte* to) {
    for_parts(next, range, [&](int t, std::byte* tensor, size_t offset, size_t nbytes) {
      if (gives(t, topology_.local_rank)) copy_shared(to + offset, tensor, nbytes);
    });
  };
  if (memory_->is_small(next.bucket)) {
    pack(whole(next), memory_->shown(next, topology_.local_rank));
  } else if (!in_segment_) {
    for (int owner = 0; owner < owners_; ++owner)
      if (owner != topology_.local_rank) pack(slice(next, owner), memory_->sent(next, owner, topology_.local_rank));
  }
  memory_->raise(Stage::packed, lane.number, ++lane.packed);
  return true;
}

// Adds up this rank's slice of the next bucket, once all ranks of the node have packed it.
bool Plan::reduce_next(LaneState& lane, Channel& channel) {
  if (topology_.local_rank >= owners_ || (lane.network && lane.network->is_full())) return false;
  if (memory_->lowest(Stage::packed, lane.number, topology_.local_size()) <= lane.reduced) return false;
  if (topology_.node_count > 1 && !lane.network)
    lane.network = std::make_unique<LaneNetwork>(channel, lane.mpi_channel.get(), topology_,
                                                 number_ % kTagBlocks * LaneNetwork::kTags);
  const Turn next = memory_->turn(lane.number, lane.reduced);
  if (!know_weights(next, lane)) return false;
  const auto begin = Clock::now();
  reduce(next, lane);
  // Else what it gave us may have been overwritten.
  if (in_segment_ && !memory_->is_small(next.bucket)) team_.failure->throw_if_neighbour_failed();
  if (trace::enabled) trace::record(name_ + "/" + std::to_string(next.index), "reduce", team_.number, begin);
  ++lane.reduced;
  if (lane.network)
    set_out(next, lane);
  else if (memory_->is_small(next.bucket))
    memory_->note(Stage::reduced, lane.number, ++lane.published);
  else
    memory_->raise(Stage::reduced, lane.number, ++lane.published);
  return true;
}

// Sends this rank's slice to the other nodes.
void Plan::set_out(const Turn& turn, LaneState& lane) {
  const Bucket& bucket = turn.bucket;
  const Range mine = slice(turn, topology_.local_rank);
  const AllreduceBuffer buffer = {sum_of(turn, lane) + (mine.begin - bucket.begin),
                                  mine.size() / size_of(bucket.dtype),
                                  bucket.dtype,
                                  wire_.value_or(bucket.dtype),
                                  op_,
                                  in_segment_ ? std::shared_ptr<void>(lane.sums) : memory_->segment(),
                                  how_between_nodes(mine, bucket.dtype),
                                  nullptr,
                                  in_tree_};
  if (carries_weight(turn))
    lane.network->begin_with_weight(turn.number, algorithms_[at(turn.index)], buffer, lane.weight_of_node);
  else
    lane.network->begin(turn.number, algorithms_[at(turn.index)], buffer);
}

bool Plan::is_under_way(int lane) const {
  return lanes_[at(lane)].packed > lanes_[at(lane)].copied || next_is_started(lanes_[at(lane)]);
}

bool Plan::uses_network(int lane) const {
  return lanes_[at(lane)].network && !lanes_[at(lane)].network->is_idle();
}

int Plan::peer_awaited(int lane) const {
  return lanes_[at(lane)].network ? lanes_[at(lane)].network->waiting_for() : -1;
}

bool Plan::is_through(int lane) const {
  return lanes_[at(lane)].copied >= step() * layout_.buckets_of_lane(lane).size();
}

bool Plan::drive_network(LaneState& lane) {
  if (!lane.network || lane.network->is_idle()) return false;
  bool moved = lane.network->advance() != Progress::none;
  while (const auto arrival = lane.network->take()) {
    const Turn turn = memory_->turn(lane.number, arrival->turn);
    spread(turn, lane);
    memory_->raise(Stage::reduced, lane.number, ++lane.published);
    if (trace::enabled)
      trace::record(name_ + "/" + std::to_string(turn.index), "network", team_.number, arrival->begin);
    moved = true;
  }
  return moved;
}

// Copies what others have reduced of the next bucket back into the tensors.
bool Plan::copy_next(LaneState& lane) {
  if (lane.published <= lane.copied && topology_.local_rank < owners_) return false;
  const Turn next = memory_->turn(lane.number, lane.copied);
  if (!memory_->is_small(next.bucket)) {  // that one is here already
    if (memory_->lowest(Stage::reduced, lane.number, owners_) <= lane.copied) return false;
    for (int owner = 0; !in_segment_ && owner < owners_; ++owner)
      if (owner != topology_.local_rank)
        for_portions(slice(next, owner), [&](const Range& portion, int only) {
          if (only != Portion::kEverybody && only != topology_.local_rank) return;
          for_parts(next, portion, [&](int t, std::byte* tensor, size_t offset, size_t nbytes) {
            if (givers_.empty() || !gives(t, topology_.local_rank))  // that one has it
              copy_tensor_(tensor, memory_->result(next, owner) + offset, nbytes);
          });
        });
  }
  ++lane.copied;
  if (lane.copied % layout_.buckets_of_lane(lane.number).size() == 0) note_complete(Clock::now());
  memory_->raise(Stage::copied, lane.number, lane.copied);
  return true;
}

Range Plan::slice(const Turn& turn, int owner) const {
  const Bucket& bucket = turn.bucket;
  if (bucket.owner >= 0) return owner == bucket.owner ? whole(turn) : Range{bucket.begin, bucket.begin};
  return Layout::slice(bucket, owner, owners_);
}

// ---- the rest

std::shared_ptr<std::byte> Plan::memory() const {
  if (!in_segment_) throw Error("The tensors of plan '" + name_ + "' do not live in its segment.");
  return {memory_->segment(), memory_->tensors_of(topology_.local_rank)};
}

}  // namespace keras_hpc
