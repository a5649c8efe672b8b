// SPDX-License-Identifier: Apache-2.0
// Which way an allreduce takes: measured once for each class of sizes, remembered, or given.
#include <algorithm>
#include <array>

#include "common/error.hpp"
#include "engine/allreduce_call.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kLargest = size_t{16} << 20;  // measured; what is larger goes the same way
constexpr std::array kPaths = {Path::slot, Path::push, Path::staged, Path::library};
// The library's sums are taken in an order of its own: it must be faster by this much to be worth it.
constexpr double kLibraryGain = 1.05;
constexpr int kRounds = 7;

// The class of sizes (from, to) that holds `nbytes`: powers of four.
std::pair<size_t, size_t> size_class(size_t nbytes) {
  size_t to = 16;
  while (nbytes > to && to < kLargest) to *= 4;
  return {to == 16 ? 0 : to / 4 + 1, to == kLargest ? SIZE_MAX : to + 1};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

void AllreduceCall::add_choice(const Choice& choice) {
  const std::lock_guard lock(choices_mutex_);
  choices_.insert(choices_.begin(), choice);
}

std::vector<AllreduceCall::Choice> AllreduceCall::choices() const {
  const std::lock_guard lock(choices_mutex_);
  return choices_;
}

std::optional<Path> AllreduceCall::choice_for(const void* data, size_t nbytes) const {
  const bool in_area = area_of(data, nbytes) != nullptr;
  const std::lock_guard lock(choices_mutex_);
  for (const Choice& c : choices_)
    if (c.in_area == in_area && nbytes >= c.from && nbytes < c.to) return c.path;
  return std::nullopt;
}

Path AllreduceCall::measure(const Buffer& buffer, bool in_area) {
  const auto [from, to] = size_class(buffer.nbytes());
  const size_t nbytes = std::min({to - 1, kLargest, std::max(buffer.nbytes(), size_t{4})}) / 4 * 4;
  // Of its own: the caller's data must not change.
  const std::shared_ptr<Area> area = in_area ? make_area(nbytes) : nullptr;
  std::vector<float> own(in_area ? 0 : nbytes / 4);
  float* data = in_area ? reinterpret_cast<float*>(area->of(topology_.local_rank)) : own.data();
  const size_t count = nbytes / 4;

  std::vector<Path> paths;
  for (const Path path : kPaths) {
    if (in_area && path == Path::staged) continue;  // the same work as push, and two copies more
    if (can(path, data, count, DType::float32, Op::sum)) paths.push_back(path);
  }
  const auto time = [&](Path path, int batch) {
    std::fill(data, data + count, 1.0F);
    take(Path::staged, {nullptr, 0, DType::float32, Op::sum, 1.0, 0});  // all begin together
    const auto begin = Clock::now();
    for (int k = 0; k < batch; ++k)
      take(path, {reinterpret_cast<std::byte*>(data), count, DType::float32, Op::sum, 1.0, 0});
    return seconds_since(begin) / batch;
  };
  // The slowest rank counts, and all ranks must decide alike.
  const auto slowest = [&](const std::vector<double>& mine) {
    const std::vector<double> all = meeting_->gather(mine);
    std::vector<double> most(mine.size(), 0.0);
    for (size_t i = 0; i < all.size(); ++i) most[i % mine.size()] = std::max(most[i % mine.size()], all[i]);
    return most;
  };

  // A first look, which warms up, too: what is far behind, as a library that spins on shared cores, only costs time.
  std::vector<double> first;
  for (const Path path : paths) first.push_back(std::min(time(path, 1), time(path, 1)));
  first = slowest(first);
  const double limit = 4 * *std::min_element(first.begin(), first.end());
  std::vector<Path> candidates;
  for (size_t i = 0; i < paths.size(); ++i)
    if (first[i] <= limit) candidates.push_back(paths[i]);

  std::vector<double> medians;
  std::vector<std::vector<double>> seconds(candidates.size());
  for (int round = 0; round < kRounds && candidates.size() > 1; ++round)
    for (size_t i = 0; i < candidates.size(); ++i) seconds[i].push_back(time(candidates[i], nbytes < 16384 ? 20 : 1));
  size_t best = 0;
  if (candidates.size() > 1) {
    for (const auto& s : seconds) medians.push_back(median(s));
    medians = slowest(medians);
    for (size_t i = 0; i < candidates.size(); ++i)
      if (candidates[i] == Path::library) medians[i] *= kLibraryGain;
    best = static_cast<size_t>(std::min_element(medians.begin(), medians.end()) - medians.begin());
  }
  add_choice({in_area, from, to, candidates[best]});
  return candidates[best];
}

Path AllreduceCall::fallback(const void* data, size_t nbytes) const {
  if (area_of(data, nbytes) != nullptr) return Path::push;
  return nbytes <= 1024 && can(Path::slot, data, nbytes / 4, DType::float32, Op::sum) ? Path::slot : Path::staged;
}

}  // namespace keras_hpc
