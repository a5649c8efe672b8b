// Kernels of the fake libcuda.so.1: what the fake libnvrtc.so has compiled for the host, run by streams.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

#include "fake_cuda.hpp"
#include "fake_nvrtc.hpp"

using namespace fake_cuda;

#define ENTER(...) \
  if (const int error = enter(__VA_ARGS__); error != 0) return error

namespace {

struct Function {
  void (*run)(const void* parameters, unsigned blocks, unsigned threads);
  size_t parameter_bytes;
};

// Of the device, where streams find it: in the kernel's parameters, what could be an address of the device is one.
std::vector<Copies::Number> find_memory(std::vector<uint64_t>& words) {
  std::vector<Copies::Number> used;
  for (uint64_t& word : words) {
    std::byte* found = memory.behind(word, 1);
    if (found == nullptr) continue;
    word = reinterpret_cast<uint64_t>(found);
    used.push_back(Copies::all().begin(found, found, 1));
  }
  return used;
}

}  // namespace

EXPORT int cuModuleLoadData(void** module, const void* image) {
  ENTER("cuModuleLoadData", true);
  need_context("cuModuleLoadData");
  fake_nvrtc::Header header;
  std::memcpy(&header, image, sizeof header);
  if (header.magic != fake_nvrtc::kMagic) die("a module that is no kernel's");
  const int file = memfd_create("fake module", 0);
  if (write(file, static_cast<const char*>(image) + sizeof header, header.nbytes) !=
      static_cast<ssize_t>(header.nbytes))
    die("no memory");
  *module = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  close(file);
  if (*module == nullptr) die(dlerror());
  ++modules;
  return 0;
}
EXPORT int cuModuleUnload(void*) {  // streams may still run its kernels: it stays
  const int error = enter("cuModuleUnload", true);
  --modules;
  return error;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER("cuModuleGetFunction");
  void* run = dlsym(module, (std::string("fake_") + name).c_str());
  if (run == nullptr) return 500;  // CUDA_ERROR_NOT_FOUND
  static auto& known = *new std::map<void*, Function>;
  const std::lock_guard lock(world);
  Function& found = known[run];
  std::memcpy(&found.run, &run, sizeof run);
  found.parameter_bytes = *static_cast<size_t*>(dlsym(module, "fake_parameter_bytes"));
  *function = &found;
  return 0;
}
EXPORT int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                          unsigned threads_z, unsigned shared, void* stream, void** parameters, void** more) {
  ENTER("cuLaunchKernel");
  need_context("cuLaunchKernel");
  if (x == 0 || threads == 0 || threads > 1024 || y * z * threads_y * threads_z != 1 || shared != 0 || more != nullptr)
    die("a kernel's grid that is not known here");
  const auto& its = *static_cast<Function*>(function);
  std::vector<uint64_t> words(its.parameter_bytes / sizeof(uint64_t));
  std::memcpy(words.data(), parameters[0], its.parameter_bytes);
  const auto used = find_memory(words);
  of(stream).push([=] {
    if (!spoiled) its.run(words.data(), x, threads);
    for (const auto number : used) Copies::all().end(number);
  });
  return 0;
}
