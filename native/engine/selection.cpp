// SPDX-License-Identifier: Apache-2.0
// Which way an allreduce takes: measured once for each class of sizes, remembered, or given.
#include <algorithm>
#include <array>
#include <cstring>

#include "common/error.hpp"
#include "engine/allreduce_call.hpp"

namespace keras_hpc {
namespace {

constexpr size_t kLargest = size_t{16} << 20;  // measured; what is larger goes the same way
constexpr std::array kPaths = {Path::slot, Path::push, Path::staged, Path::library};
// The library's sums are taken in an order of its own: it must be faster by this much to be worth it.
constexpr double kLibraryGain = 1.05;
constexpr int kRounds = 7;

// The class of sizes [from, to) that holds `nbytes`: powers of four.
std::pair<size_t, size_t> size_class(size_t nbytes) {
  size_t to = 16;
  while (nbytes > to && to < kLargest) to *= 4;
  return {to == 16 ? 0 : to / 4 + 1, to == kLargest ? SIZE_MAX : to + 1};
}

// What is measured for it, bytes: the largest of the class, or of those that were asked for.
size_t representative(size_t nbytes) {
  return std::min({size_class(nbytes).second - 1, kLargest, std::max(nbytes, size_t{4})}) / 4 * 4;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

Path AllreduceCall::way_of(const void* data, size_t count, DType dtype, Op op, bool rounds) const {
  const size_t nbytes = count * size_of(dtype);
  const Path path = choices_.path(area_of(data, nbytes) ? Place::segment : Place::own, nbytes).value_or(Path::unknown);
  return can(path, data, count, dtype, op) && !(rounds && path == Path::library) ? path : fallback(data, nbytes);
}

Algorithm AllreduceCall::algorithm_for(size_t nbytes, bool measured) {
  if (const std::optional<Algorithm> known = choices_.algorithm(nbytes)) return *known;
  const auto peers = static_cast<size_t>(topology_.node_count);
  if (!measured || topology_.node_count == 1) return usual_algorithm(nbytes, peers);
  const std::lock_guard lock(mutex_);
  return measure_network(nbytes);
}

Algorithm AllreduceCall::measure_network(size_t nbytes) {
  const size_t count = representative(nbytes) / sizeof(float);
  std::vector<float> data(count);
  const auto bytes = reinterpret_cast<std::byte*>(data.data());
  const auto before = [&](size_t begin, size_t n, std::byte* to) { std::memcpy(to, bytes + 4 * begin, 4 * n); };
  const auto after = [&](size_t begin, size_t n, std::byte* from) { std::memcpy(bytes + 4 * begin, from, 4 * n); };
  std::vector<Candidate> candidates;
  for (const Algorithm algorithm : kAlgorithms) {
    // These send what pairwise sends: between two nodes, and where there is a single digit.
    if (topology_.node_count == 2 && (algorithm == Algorithm::ring || algorithm == Algorithm::rabenseifner)) continue;
    if (algorithm == Algorithm::radix_k && radices(topology_.node_count).size() == 1) continue;
    if (algorithm == Algorithm::library && !meeting_->has_library()) continue;
    const auto run = [&, algorithm] {
      if (owns_slice())
        meeting_->across_nodes(algorithm, count, DType::float32, DType::float32, Op::sum, before, after);
    };
    candidates.push_back({static_cast<int>(algorithm), run, algorithm == Algorithm::library ? kLibraryGain : 1.0});
  }
  const int way = fastest(candidates, data.data(), count);
  const auto [from, to] = size_class(nbytes);
  choices_.add({Place::network, from, to, way});
  return static_cast<Algorithm>(way);
}

Path AllreduceCall::measure(const Buffer& buffer, bool in_area) {
  const size_t nbytes = representative(buffer.nbytes());
  const size_t count = nbytes / sizeof(float);
  // The slices that it is cut into go between nodes in their best way already.
  if (topology_.node_count > 1)
    for (const size_t whole : {nbytes, std::min(nbytes, kStageBytes)})
      if (const size_t slice = whole / static_cast<size_t>(topology_.owners); !choices_.algorithm(slice))
        measure_network(slice);

  // Of its own: the caller's data must not change.
  const std::shared_ptr<Area> area = in_area ? make_area(meeting_->channel(), nbytes) : nullptr;
  std::vector<float> own(in_area ? 0 : count);
  float* data = in_area ? reinterpret_cast<float*>(area->of(topology_.local_rank)) : own.data();
  std::vector<Candidate> candidates;
  for (const Path path : kPaths) {
    if (in_area && path == Path::staged) continue;  // the same work as push, and two copies more
    if (!can(path, data, count, DType::float32, Op::sum)) continue;
    const Buffer example{reinterpret_cast<std::byte*>(data), count, DType::float32, Op::sum, DType::float32, 1.0, 0};
    candidates.push_back({static_cast<int>(path), [this, path, example] { take(path, example); },
                          path == Path::library ? kLibraryGain : 1.0});
  }
  const int way = fastest(candidates, data, count);
  const auto [from, to] = size_class(buffer.nbytes());
  choices_.add({in_area ? Place::segment : Place::own, from, to, way});
  return static_cast<Path>(way);
}

// Collective; the slowest rank counts, and all ranks decide alike. `data` are what the candidates reduce.
int AllreduceCall::fastest(const std::vector<Candidate>& candidates, float* data, size_t count) {
  const auto time = [&](const Candidate& candidate, int batch) {
    std::fill(data, data + count, 1.0F);
    // All begin together.
    take(Path::staged, {nullptr, 0, DType::float32, Op::sum, DType::float32, 1.0, 0});
    const auto begin = Clock::now();
    for (int k = 0; k < batch; ++k) candidate.run();
    return seconds_since(begin) / batch;
  };
  const auto slowest = [&](const std::vector<double>& mine) {
    const std::vector<double> all = meeting_->gather(mine);
    std::vector<double> most(mine.size(), 0.0);
    for (size_t i = 0; i < all.size(); ++i) most[i % mine.size()] = std::max(most[i % mine.size()], all[i]);
    return most;
  };

  // A first look, which warms up, too: what is far behind, as a library that spins on shared cores, only costs time.
  std::vector<double> first;
  for (const Candidate& c : candidates) first.push_back(std::min(time(c, 1), time(c, 1)));
  first = slowest(first);
  const double limit = 4 * *std::min_element(first.begin(), first.end());
  std::vector<Candidate> close;
  for (size_t i = 0; i < candidates.size(); ++i)
    if (first[i] <= limit) close.push_back(candidates[i]);
  if (close.size() == 1) return close[0].way;

  std::vector<std::vector<double>> seconds(close.size());
  for (int round = 0; round < kRounds; ++round)
    for (size_t i = 0; i < close.size(); ++i)
      seconds[i].push_back(time(close[i], count * sizeof(float) < 16384 ? 20 : 1));
  std::vector<double> medians;
  for (const auto& s : seconds) medians.push_back(median(s));
  medians = slowest(medians);
  for (size_t i = 0; i < close.size(); ++i) medians[i] *= close[i].handicap;
  return close[static_cast<size_t>(std::min_element(medians.begin(), medians.end()) - medians.begin())].way;
}

Path AllreduceCall::fallback(const void* data, size_t nbytes) const {
  if (area_of(data, nbytes) != nullptr) return Path::push;
  return nbytes <= 1024 && can(Path::slot, data, nbytes / 4, DType::float32, Op::sum) ? Path::slot : Path::staged;
}

}  // namespace keras_hpc
