// A libnvrtc.so without CUDA: it compiles the engine's kernel for the host, with the words of CUDA that it uses.
#include "fake_nvrtc.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kCompilation = 6, kInternalError = 11;

constexpr const char* kBefore = R"(
#include <cstddef>
#include <cstring>
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Index {
  unsigned x;
};
static thread_local Index gridDim, blockDim, blockIdx, threadIdx;
static float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
#define __device__ static
#define __global__
)";
constexpr const char* kBehind = R"(
#define FAKE_RUN(kernel)                                                                     \
  extern "C" void fake_##kernel(const void* parameters, unsigned blocks, unsigned threads) { \
    gridDim.x = blocks;                                                                      \
    blockDim.x = threads;                                                                    \
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)                                  \
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)                            \
        kernel(*static_cast<const Sum*>(parameters));                                        \
  }
FAKE_RUN(sum_float16)
FAKE_RUN(sum_bfloat16)
FAKE_RUN(sum_float32)
FAKE_RUN(sum_float64)
extern "C" {
size_t fake_parameter_bytes = sizeof(Sum);
}
)";

struct Program {
  std::string source, binary, log;
};

std::mutex world;
std::string failing;
std::map<std::string, int> calls;
std::map<std::string, std::string> compiled;  // of a source

int enter(const char* name) {
  const std::lock_guard lock(world);
  ++calls[name];
  return failing == name ? kInternalError : kSuccess;
}

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

int compile(Program& program) {
  const std::lock_guard lock(world);
  std::string& known = compiled[program.source];
  if (known.empty()) {
    char folder[] = "/tmp/fake-nvrtc-XXXXXX";
    if (mkdtemp(folder) == nullptr) return kInternalError;
    const std::string stem = std::string(folder) + "/kernel";
    std::ofstream(stem + ".cpp") << kBefore << program.source << kBehind;
    const std::string command = "g++ -std=c++17 -O1 -ffp-contract=off -shared -fPIC -o " + stem + ".so " + stem +
                                ".cpp > " + stem + ".log 2>&1";
    const bool failed = std::system(command.c_str()) != 0;
    const std::string library = failed ? "" : text_of(stem + ".so");
    program.log = text_of(stem + ".log");
    for (const char* end : {".cpp", ".so", ".log"}) unlink((stem + end).c_str());
    rmdir(folder);
    if (failed) return kCompilation;
    const fake_nvrtc::Header header{fake_nvrtc::kMagic, library.size()};
    known = std::string(reinterpret_cast<const char*>(&header), sizeof header) + library;
  }
  program.binary = known;
  return kSuccess;
}

}  // namespace

// Each call of a function fails; "": none does.
EXPORT void fake_nvrtc_fail(const char* name) {
  const std::lock_guard lock(world);
  failing = name;
}
EXPORT int fake_nvrtc_calls(const char* name) {
  const std::lock_guard lock(world);
  return calls[name];
}

EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 9;
  return enter("nvrtcVersion");
}
EXPORT const char* nvrtcGetErrorString(int result) {
  return result == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INTERNAL_ERROR";
}
EXPORT int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*,
                              const char* const*) {
  if (const int error = enter("nvrtcCreateProgram"); error != kSuccess) return error;
  *program = new Program{source, "", ""};
  return kSuccess;
}
EXPORT int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return kSuccess;
}
EXPORT int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  std::string all;
  for (int i = 0; i < count; ++i) all += options[i] + std::string(" ");
  if (all != "--gpu-architecture=sm_90 --std=c++17 --fmad=false ") {
    std::fprintf(stderr, "fake NVRTC: options that are not known here: %s\n", all.c_str());
    std::abort();
  }
  if (const int error = enter("nvrtcCompileProgram"); error != kSuccess) {
    program->log = "the kernel is wrong";
    return error;
  }
  return compile(*program);
}
EXPORT int nvrtcGetProgramLogSize(Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return kSuccess;
}
EXPORT int nvrtcGetProgramLog(Program* program, char* log) {
  std::strcpy(log, program->log.c_str());
  return kSuccess;
}
EXPORT int nvrtcGetCUBINSize(Program* program, size_t* size) {
  *size = program->binary.size();
  return enter("nvrtcGetCUBINSize");
}
EXPORT int nvrtcGetCUBIN(Program* program, char* binary) {
  std::memcpy(binary, program->binary.data(), program->binary.size());
  return enter("nvrtcGetCUBIN");
}
