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
  const int batch = nbytes < 16384 ? 20 : 1;
  constexpr int rounds = 7;
  std::vector<std::vector<double>> seconds(paths.size());
  for (int round = 0; round < rounds; ++round)
    for (size_t i = 0; i < paths.size(); ++i) {
      std::fill(data, data + count, static_cast<float>(round));
      take(Path::staged, {nullptr, 0, DType::float32, Op::sum, 1.0, 0});  // all begin together
      const auto begin = Clock::now();
      for (int k = 0; k < batch; ++k)
        take(paths[i], {reinterpret_cast<std::byte*>(data), count, DType::float32, Op::sum, 1.0, 0});
      seconds[i].push_back(seconds_since(begin));
    }

  // The slowest rank counts, and all ranks must decide alike.
  std::vector<double> mine;
  for (const auto& s : seconds) mine.push_back(median(s));
  const std::vector<double> all = gather(mine);
  size_t best = 0;
  double least = 0;
  for (size_t i = 0; i < paths.size(); ++i) {
    double slowest = 0;
    for (size_t rank = 0; rank < static_cast<size_t>(topology_.size); ++rank)
      slowest = std::max(slowest, all[rank * paths.size() + i]);
    if (paths[i] == Path::library) slowest *= kLibraryGain;
    if (i == 0 || slowest < least) {
      best = i;
      least = slowest;
    }
  }
  add_choice({in_area, from, to, paths[best]});
  return paths[best];
}

Path AllreduceCall::fallback(const void* data, size_t nbytes) const {
  if (area_of(data, nbytes) != nullptr) return Path::push;
  return nbytes <= 1024 && can(Path::slot, data, nbytes / 4, DType::float32, Op::sum) ? Path::slot : Path::staged;
}

}  // namespace keras_hpc
