// SPDX-License-Identifier: Apache-2.0
// What a plan does where ranks do not all give, or need, all.
#include <algorithm>

#include "common/index.hpp"
#include "engine/plan.hpp"

namespace keras_hpc {

bool Plan::gives(int tensor, int local_rank) const {
  return givers_.empty() || givers_[at(tensor)] == topology_.local_ranks()[at(local_rank)];
}

bool Plan::only_reads(int tensor) const {
  return !givers_.empty() && topology_.node_count == 1 && gives(tensor, topology_.local_rank);
}

// Hands on a part of this rank's slice, or of a small bucket, from the rank that gives it. Where that is on another
// node, this one adds nothing to what the network brings.
void Plan::gather(const Turn& turn, int tensor, std::byte* mine, size_t offset, size_t nbytes, LaneState& lane) {
  const int me = topology_.local_rank;
  const bool small = memory_->is_small(turn.bucket);
  int giver = 0;
  while (giver < topology_.local_size() && !gives(tensor, giver)) ++giver;
  std::byte* sum = small ? nullptr : sum_of(turn, lane) + offset;
  if (giver == topology_.local_size()) {
    fill_neutral(turn.bucket.dtype, sum, nbytes);
    return;
  }
  const std::byte* from =
      giver == me ? mine : (small ? memory_->shown(turn, giver) : memory_->sent(turn, me, giver)) + offset;
  if (sum != nullptr) copy_shared(sum, from, nbytes);
  if (giver != me && topology_.node_count == 1) copy_shared(mine, from, nbytes);
}

std::vector<Portion>::const_iterator Plan::first_portion(size_t place) const {
  return std::upper_bound(portions_.begin(), portions_.end(), place,
                          [](size_t from, const Portion& portion) { return from < portion.end; });
}

// Of this rank's slice, which node needs, or gives, which elements.
Partial Plan::how_between_nodes(const Range& slice, DType dtype) const {
  Partial how{flow_, {}};
  if (flow_ == Flow::to_all) return how;
  const size_t size = size_of(dtype);
  for (auto portion = first_portion(slice.begin); portion != portions_.end() && portion->begin < slice.end; ++portion) {
    const size_t first = (std::max(portion->begin, slice.begin) - slice.begin) / size;
    const size_t last = (std::min(portion->end, slice.end) - slice.begin) / size;
    if (!how.extents.empty() && how.extents.back().peer == portion->node)
      how.extents.back().end = last;
    else if (first < last)
      how.extents.push_back({first, last, portion->node});
  }
  return how;
}

// From where the network left it to the tensors of this rank that need it, or of all ranks where they live in the
// segment.
void Plan::spread(const Turn& turn, LaneState& lane) {
  const int me = topology_.local_rank;
  // If nobody has samples, the sums are zeros.
  const double scale = divides_late_ && lane.network->weight() > 0 ? 1.0 / lane.network->weight() : 1.0;
  for_portions(slice(turn, me), [&](const Range& portion, int only) {
    if (only == Portion::kElsewhere) return;
    const bool everybody = only == Portion::kEverybody;
    for_parts(turn, portion, [&](int, std::byte* mine, size_t offset, size_t nbytes) {
      std::byte* from = sum_of(turn, lane) + offset;
      lane.outs.clear();
      if (everybody || only == me) lane.outs.push_back(mine);
      for (int r = 0; r < topology_.local_size(); ++r)
        if (r != me && in_segment_ && (everybody || only == r))
          lane.outs.push_back(memory_->sent(turn, me, r) + offset);
      if (scale == 1.0) {
        for (void* out : lane.outs) copy_shared(out, from, nbytes);
        return;
      }
      // Where the other ranks find it.
      if (!in_segment_ && (everybody ? topology_.local_size() > 1 : only != me)) lane.outs.push_back(from);
      const Source source{from, 1.0};
      keras_hpc::reduce(turn.bucket.dtype, Op::sum, &source, 1, false, scale, lane.outs.data(), lane.outs.size(),
                        nbytes / size_of(turn.bucket.dtype));
    });
  });
}

}  // namespace keras_hpc
