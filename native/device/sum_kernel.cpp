// SPDX-License-Identifier: Apache-2.0
#include "device/sum_kernel.hpp"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "common/error.hpp"
#include "common/waiting.hpp"
#include "device/library.hpp"
#include "device/nvrtc_api.hpp"

namespace keras_hpc::device {
namespace {

constexpr unsigned kThreads = 512;  // of a block
constexpr double kTrialSeconds = 10;
constexpr auto kTrialNap = std::chrono::microseconds(10);

// A program of NVRTC's, as long as it lives.
class Program {
 public:
  explicit Program(const char* source) : api_(nvrtc()) {
    check(api_.create(&handle_, source, "sum.cu", 0, nullptr, nullptr), "nvrtcCreateProgram");
  }
  ~Program() { api_.destroy(&handle_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  std::string compile(const std::vector<const char*>& options) {
    if (const Result result = api_.compile(handle_, static_cast<int>(options.size()), options.data()); result != 0) {
      size_t size = 0;
      api_.log_size(handle_, &size);
      std::string log(size, 0);
      if (size > 0) api_.log(handle_, log.data());
      throw Error(std::string("NVRTC: nvrtcCompileProgram failed: ") + api_.error_text(result) + ". " + log.c_str());
    }
    size_t size = 0;
    check(api_.binary_size(handle_, &size), "nvrtcGetCUBINSize");
    std::string binary(size, 0);
    check(api_.binary(handle_, binary.data()), "nvrtcGetCUBIN");
    return binary;
  }

 private:
  void check(Result result, const char* function) const {
    if (result != 0) throw Error(std::string("NVRTC: ") + function + " failed: " + api_.error_text(result) + ".");
  }
  const NvrtcApi& api_;
  NvrtcProgram handle_ = nullptr;
};

int attribute(const Device& device, int number) {
  int value = 0;
  device.check(device.api().device_attribute(&value, number, device.handle()), "cuDeviceGetAttribute");
  return value;
}

// For GPUs of one kind, which the kernel's code is made for: drivers older than NVRTC take that, but no PTX of it.
const std::string& binary_for(int capability) {
  static std::mutex mutex;
  static auto& known = *new std::map<int, std::string>;
  const std::lock_guard lock(mutex);
  std::string& binary = known[capability];
  if (!binary.empty()) return binary;
  const std::string kind = "--gpu-architecture=sm_" + std::to_string(capability);
  // A product and a sum are rounded one after the other, as on the host.
  return binary = Program(kSumKernel).compile({kind.c_str(), "--std=c++17", "--fmad=false"});
}

}  // namespace

const NvrtcApi& nvrtc(const std::string& path) {
  static std::mutex mutex;
  static const NvrtcApi* found = nullptr;
  const std::lock_guard lock(mutex);
  if (found != nullptr) return *found;
  void* library =
      open_library("NVRTC, CUDA's compiler,", {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"}, path);
  NvrtcApi api;
#define KERAS_HPC_BIND(name, symbol, type) bind_symbol(library, api.name, symbol, "NVRTC", "11.2 or newer");
  KERAS_HPC_NVRTC_API(KERAS_HPC_BIND)
#undef KERAS_HPC_BIND
  found = new NvrtcApi(api);  // never unloaded
  return *found;
}

Sum sum_of(const std::vector<Pointer>& sources, const Weights& weights, size_t nbytes) {
  Sum sum = {};
  sum.scale = weights.scale;
  sum.weighted = weights.weighted;
  sum.lines = nbytes / 16;  // buckets are of whole lines of 64
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    const double factor = weights.weighted ? weights.factors[rank] : 1.0;
    if (factor == 0.0) continue;  // has no samples in this step; its values may be NaN
    sum.factors[sum.n_sources] = factor;
    sum.sources[sum.n_sources++] = sources[rank];
  }
  return sum;
}

SumKernel::SumKernel(const Device& device)
    : device_(device), most_blocks_(static_cast<unsigned>(std::max(1, attribute(device, kMultiprocessors)))) {
  const int capability = 10 * attribute(device, kMajorCapability) + attribute(device, kMinorCapability);
  const Current current(device_);
  device_.check(device_.api().load_module(&module_, binary_for(capability).data()), "cuModuleLoadData");
  try {
    find_functions();
    try_to_launch();
  } catch (const std::exception&) {
    device_.api().unload_module(module_);
    throw;
  }
}

void SumKernel::find_functions() {
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64}) {
    const std::string name = std::string("sum_") + name_of(dtype);
    device_.check(device_.api().find_function(&functions_[dtype], module_, name.c_str()), "cuModuleGetFunction");
  }
}

// On no memory at all: what cannot be launched here is known now, and not in a step.
void SumKernel::try_to_launch() const {
  const Stream stream(device_);
  Event over(device_);
  for (const auto& [dtype, function] : functions_) launch(dtype, {}, stream.handle());
  over.record(stream.handle());
  for (const auto begin = Clock::now(); !over.is_over(); std::this_thread::sleep_for(kTrialNap))
    if (seconds_since(begin) > kTrialSeconds) throw Timeout("The GPU does not do what it is given.");
}

SumKernel::~SumKernel() {
  ContextHandle before = nullptr;
  if (device_.api().push_context(device_.context()) != 0) return;
  device_.api().unload_module(module_);
  device_.api().pop_context(&before);
}

void SumKernel::launch(DType dtype, const Sum& sum, StreamHandle stream) const {
  const auto blocks =
      static_cast<unsigned>(std::clamp<unsigned long long>((sum.lines + kThreads - 1) / kThreads, 1, most_blocks_));
  Sum told = sum;
  void* parameters[] = {&told};
  device_.check(
      device_.api().launch(functions_.at(dtype), blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr),
      "cuLaunchKernel");
}

}  // namespace keras_hpc::device
