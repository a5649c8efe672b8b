// SPDX-License-Identifier: Apache-2.0
#include "engine/stopwatch.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "common/error.hpp"

namespace keras_hpc {
namespace {

bool starts_with(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

Path path_of(const std::string& way) {
  return parse_path(way.substr(way.find(' ') + 1));
}

}  // namespace

struct Stopwatch::Memory {
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

  Memory(Team& team, size_t nbytes) : own(nbytes), second(nbytes), packed(nbytes), area(team.make_area(nbytes)) {}
  Pages own, second, packed;
  std::shared_ptr<Area> area;
};

Stopwatch::Stopwatch(Team& team, size_t nbytes, int tensors, std::optional<DType> wire)
    : team_(team), count_(nbytes / sizeof(float)), wire_(wire) {
  if (team.topology().size == 1) throw Error("One rank has nothing to reduce. Expected two or more.");
  memory_ = std::make_unique<Memory>(team, nbytes);
  channel_ = team.open_channel();
  if (tensors <= 0) return;
  std::vector<TensorSpec> specs;
  const auto n = std::min<size_t>(static_cast<size_t>(tensors), std::max<size_t>(count_, 1));
  for (size_t t = 0; t <= n; ++t) begins_.push_back(count_ * t / n);
  for (size_t t = 0; t < n; ++t)
    specs.push_back({"t" + std::to_string(t), DType::float32, static_cast<int64_t>(begins_[t + 1] - begins_[t])});
  plan_ = team.make_plan("stopwatch " + std::to_string(nbytes), specs, {Op::sum, false, wire});
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

std::string Stopwatch::chosen(const std::string& way) const {
  AllreduceCall& call = team_.allreduce_call();
  const size_t nbytes = count_ * sizeof(float);
  std::string text = "plan";
  if (way != "fusion") {
    const bool rounds = wire_ && team_.topology().node_count > 1;
    const Path path = call.way_of(data_of(way), count_, DType::float32, Op::sum, rounds);
    text = name_of(path);
    if (path != Path::push && path != Path::staged) return text;
  }
  if (team_.topology().node_count == 1) return text;
  return text + ", " + name_of(call.algorithm_for(nbytes / static_cast<size_t>(team_.topology().owners), false));
}

std::function<void()> Stopwatch::operation(const std::string& way) {
  float* data = data_of(way);
  AllreduceCall& call = team_.allreduce_call();
  if (way == "private" || way == "segment")
    return [=, &call] { call.run(data, count_, DType::float32, Op::sum, wire_); };
  if (way == "mpi") return [=] { channel_->allreduce(data, count_, DType::float32, Op::sum); };
  if (way == "mpi nonblocking")
    return [=] {
      const RequestPtr request = channel_->iallreduce(data, count_, DType::float32, Op::sum);
      while (!request->test()) {
      }
    };
  if (way == "fusion")
    return [=] {
      const int n = plan_->layout().tensor_count();
      for (int t = 0; t < n; ++t) team_.start(*plan_, t, data + begins_[static_cast<size_t>(t)], 1.0);
      for (int t = 0; t < n; ++t) team_.wait(*plan_, t);
    };
  if (way == "mpi fusion")
    return [=] {
      float* packed = memory_->packed.get();
      for (size_t t = 0; t + 1 < begins_.size(); ++t)
        std::memcpy(packed + begins_[t], data + begins_[t], (begins_[t + 1] - begins_[t]) * sizeof(float));
      channel_->allreduce(packed, count_, DType::float32, Op::sum);
      for (size_t t = 0; t + 1 < begins_.size(); ++t)
        std::memcpy(data + begins_[t], packed + begins_[t], (begins_[t + 1] - begins_[t]) * sizeof(float));
    };
  if (way == "floor")
    return [=] {
      float* other = memory_->second.get();
      const Source sources[] = {{data, 1.0}, {other, 1.0}};
      void* const outs[] = {data, other};
      reduce(DType::float32, Op::sum, sources, 2, false, 1.0, outs, 2, (count_ + 1) / 2);
    };
  const Path path = path_of(way);
  return [=, &call] { call.run(data, count_, DType::float32, Op::sum, wire_, path); };
}

void Stopwatch::rewrite(float* data, float value) const {
  std::fill(data, data + count_, value);
}

void Stopwatch::meet() {
  team_.allreduce_call().run(nullptr, 0, DType::float32, Op::sum, std::nullopt, Path::staged);
}

bool Stopwatch::verify(const std::string& way) {
  float* data = data_of(way);
  const Topology& topology = team_.topology();
  const auto value = [&](int rank, size_t i) { return static_cast<float>((i * 7 + static_cast<size_t>(rank)) % 16); };
  for (size_t i = 0; i < count_; ++i) data[i] = value(topology.rank, i);
  operation(way)();
  bool correct = true;
  for (size_t i = 0; i < count_ && way != "floor"; ++i) {
    float sum = 0;
    for (int rank = 0; rank < topology.size; ++rank) sum += value(rank, i);
    correct = correct && data[i] == sum;
  }
  return correct;
}

std::vector<double> Stopwatch::time(const std::string& way, int repeats, int batch) {
  float* data = data_of(way);
  const std::function<void()> run = operation(way);
  std::vector<double> seconds;
  if (batch == 1) {
    for (int i = 0; i < repeats; ++i) {
      rewrite(data, value_ += 1);
      meet();
      const auto begin = Clock::now();
      run();
      seconds.push_back(seconds_since(begin));
    }
    return seconds;
  }
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
      run();
    }
    seconds.push_back(std::max(seconds_since(begin) - rewriting, 0.0) / batch);
  }
  return seconds;
}

}  // namespace keras_hpc
