// SPDX-License-Identifier: Apache-2.0
#include "engine/stopwatch.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "common/error.hpp"

namespace keras_hpc {
namespace {

// Pages of this process, touched.
class Pages {
 public:
  explicit Pages(size_t nbytes) : nbytes_(nbytes + 4096) {
    data_ = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data_ == MAP_FAILED) throw Error("No memory for measuring.");
  }
  ~Pages() { munmap(data_, nbytes_); }
  Pages(const Pages&) = delete;
  float* get() const { return static_cast<float*>(data_); }

 private:
  size_t nbytes_;
  void* data_;
};

bool starts_with(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

Path path_of(const std::string& way) {
  return parse_path(way.substr(way.find(' ') + 1));
}

}  // namespace

struct Stopwatch::Memory {
  Memory(Team& team, size_t nbytes)
      : own(nbytes), second(nbytes), packed(nbytes), area(team.allreduce_call().make_area(nbytes)) {}
  Pages own, second, packed;
  std::shared_ptr<Area> area;
};

Stopwatch::Stopwatch(Team& team, size_t nbytes, int tensors) : team_(team), count_(nbytes / sizeof(float)) {
  if (team.topology().size == 1) throw Error("One rank has nothing to reduce. Expected two or more.");
  memory_ = std::make_unique<Memory>(team, nbytes);
  channel_ = team.open_channel();
  if (tensors <= 0) return;
  std::vector<TensorSpec> specs;
  const auto n = std::min<size_t>(static_cast<size_t>(tensors), std::max<size_t>(count_, 1));
  for (size_t t = 0; t < n; ++t)
    specs.push_back(
        {"t" + std::to_string(t), DType::float32, static_cast<int64_t>(count_ * (t + 1) / n - count_ * t / n)});
  plan_ = &team.make_plan("stopwatch " + std::to_string(nbytes), specs, Op::sum, false);
}

Stopwatch::~Stopwatch() = default;

float* Stopwatch::data_of(const std::string& way) const {
  return starts_with(way, "segment") ? reinterpret_cast<float*>(memory_->area->of(team_.topology().local_rank))
                                     : memory_->own.get();
}

bool Stopwatch::can(const std::string& way) const {
  if (starts_with(way, "mpi"))
    return channel_->can_allreduce(DType::float32, Op::sum) && (plan_ || way != "mpi fusion");
  if (way == "fusion") return plan_ != nullptr;
  if (way.find(' ') == std::string::npos) return true;
  return team_.allreduce_call().can(path_of(way), data_of(way), count_, DType::float32, Op::sum);
}

void Stopwatch::run(const std::string& way) {
  float* data = data_of(way);
  if (way == "private" || way == "segment") {
    team_.allreduce_call().run(data, count_, DType::float32, Op::sum);
  } else if (way == "mpi") {
    channel_->allreduce(data, count_, DType::float32, Op::sum);
  } else if (way == "mpi nonblocking") {
    const RequestPtr request = channel_->iallreduce(data, count_, DType::float32, Op::sum);
    while (!request->test()) {
    }
  } else if (way == "fusion") {
    size_t begin = 0;
    const int n = plan_->layout().tensor_count();
    for (int t = 0; t < n; ++t) {
      team_.start(*plan_, t, data + begin, 1.0);
      begin += static_cast<size_t>(plan_->tensors()[static_cast<size_t>(t)].count);
    }
    for (int t = 0; t < n; ++t) team_.wait(*plan_, t);
  } else if (way == "mpi fusion") {
    float* packed = memory_->packed.get();
    size_t begin = 0;
    for (const TensorSpec& tensor : plan_->tensors()) {
      std::memcpy(packed + begin, data + begin, static_cast<size_t>(tensor.count) * sizeof(float));
      begin += static_cast<size_t>(tensor.count);
    }
    channel_->allreduce(packed, count_, DType::float32, Op::sum);
    begin = 0;
    for (const TensorSpec& tensor : plan_->tensors()) {
      std::memcpy(data + begin, packed + begin, static_cast<size_t>(tensor.count) * sizeof(float));
      begin += static_cast<size_t>(tensor.count);
    }
  } else if (way == "floor") {
    float* other = memory_->second.get();
    const Source sources[] = {{data, 1.0}, {other, 1.0}};
    void* const outs[] = {data, other};
    reduce(DType::float32, Op::sum, sources, 2, false, 1.0, outs, 2, (count_ + 1) / 2);
  } else {
    team_.allreduce_call().run(data, count_, DType::float32, Op::sum, path_of(way));
  }
}

void Stopwatch::rewrite(float* data, float value) const {
  std::fill(data, data + count_, value);
}

void Stopwatch::meet() {
  team_.allreduce_call().run(nullptr, 0, DType::float32, Op::sum, Path::staged);
}

bool Stopwatch::verify(const std::string& way) {
  float* data = data_of(way);
  const Topology& topology = team_.topology();
  const auto value = [&](int rank, size_t i) { return static_cast<float>((i * 7 + static_cast<size_t>(rank)) % 64); };
  for (size_t i = 0; i < count_; ++i) data[i] = value(topology.rank, i);
  run(way);
  bool correct = true;
  for (size_t i = 0; i < count_ && way != "floor"; ++i) {
    float sum = 0;
    for (int rank = 0; rank < topology.size; ++rank) sum += value(rank, i);
    correct = correct && data[i] == sum;
  }
  return correct;
}

std::vector<double> Stopwatch::time(const std::string& way, int repeats) {
  float* data = data_of(way);
  std::vector<double> seconds;
  if (count_ * sizeof(float) >= kBatchBytes) {
    for (int i = 0; i < repeats; ++i) {
      rewrite(data, value_ += 1);
      meet();
      const auto begin = Clock::now();
      run(way);
      seconds.push_back(seconds_since(begin));
    }
    return seconds;
  }
  constexpr int batch = 200;
  for (int i = 0; i < repeats; ++i) {
    const auto before = Clock::now();
    for (int k = 0; k < batch; ++k) {
      rewrite(data, value_ += 1);
      asm volatile("" ::"r"(data) : "memory");  // as if somebody read it
    }
    const double rewriting = seconds_since(before);
    meet();
    const auto begin = Clock::now();
    for (int k = 0; k < batch; ++k) {
      rewrite(data, value_ += 1);
      run(way);
    }
    seconds.push_back(std::max(seconds_since(begin) - rewriting, 0.0) / batch);
  }
  return seconds;
}

}  // namespace keras_hpc
