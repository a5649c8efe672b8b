// A libcuda.so.1 without a GPU, which finds what a real one would hide.
//
// Misuse ends the process with its reason. What tests tell it is in fake_cuda_controls.cpp.
#include "fake_cuda.hpp"

#include <cstdio>

using namespace fake_cuda;

// What gives something back does so, and tells its error, which may be another call's, afterwards.
#define ENTER(...) \
  if (const int error = enter(__VA_ARGS__); error != 0) return error

namespace {

constexpr int kInvalidValue = 1, kNotReady = 600, kAlreadyPinned = 712, kNotPinned = 713;

// What cuIpcGetMemHandle hands out.
struct Exported {
  int process, file, device;
  size_t nbytes;
};

// Memory of the host where the device finds it, as 8 bytes.
std::atomic<uint64_t>* flag_at(uint64_t pointer) {
  if (!is_pinned(reinterpret_cast<void*>(pointer), 8)) die("a flag in memory that is not pinned");
  return reinterpret_cast<std::atomic<uint64_t>*>(pointer);
}

int copy(const char* name, void* stream, std::byte* to, const std::byte* from, size_t n, const void* host,
         const void* device) {
  need_context(name);
  if (!is_pinned(host, n) && !pageable) die(std::string(name) + " of memory that is not pinned: it would wait");
  if (device == nullptr) die(std::string(name) + " of memory that is not the device's");
  Copies& all = Copies::all();
  of(stream).push([to, from, n, &all, copy = all.begin(host, device, n)] {
    std::memcpy(to, from, n);
    all.end(copy);
  });
  return 0;
}

}  // namespace

EXPORT uint64_t fake_allocate(size_t n, int device);
EXPORT void fake_free(uint64_t pointer);

EXPORT int cuInit(unsigned) {
  ENTER("cuInit");
  return 0;
}
EXPORT int cuDriverGetVersion(int* version) {
  ENTER("cuDriverGetVersion");
  *version = 13000;
  return 0;
}
EXPORT int cuGetErrorName(int error, const char** name) {
  *name = error == 999              ? "CUDA_ERROR_UNKNOWN"
          : error == kAlreadyPinned ? "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
                                    : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
EXPORT int cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = devices;
  return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet");
  *device = first_device + ordinal;
  return 0;
}
EXPORT int cuDeviceGetName(char* name, int length, int) {
  ENTER("cuDeviceGetName");
  std::snprintf(name, static_cast<size_t>(length), "Fake GPU");
  return 0;
}
EXPORT int cuDeviceGetUuid_v2(char* uuid, int device) {
  ENTER("cuDeviceGetUuid");
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<char>(16 * device + i);
  return 0;
}
EXPORT int cuDeviceGetPCIBusId(char* text, int length, int device) {
  ENTER("cuDeviceGetPCIBusId");
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device);
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  ENTER("cuDeviceGetAttribute");
  if (attribute != 16 && attribute != 75 && attribute != 76) die("an attribute that is not known here");
  *value = attribute == 16 ? 3 : attribute == 75 ? 9 : 0;  // multiprocessors, and what they can
  return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  const std::lock_guard lock(world);
  ++contexts[device];
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
  return 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  const int error = enter("cuDevicePrimaryCtxRelease");
  const std::lock_guard lock(world);
  if (--contexts[device] < 0) die("a context is released that was not retained");
  return error;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  ENTER("cuCtxPushCurrent");
  current.push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
  return 0;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  const int error = enter("cuCtxPopCurrent");
  need_context("cuCtxPopCurrent");
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(current.back()) + 1);
  current.pop_back();
  return error;
}
EXPORT int cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  ENTER("cuStreamCreateWithPriority");
  need_context("cuStreamCreate");
  if (flags != 1) die("a stream that waits for the default stream");
  ++streams;
  *stream = new Stream;
  return 0;
}
EXPORT int cuStreamDestroy_v2(void* stream) {
  const int error = enter("cuStreamDestroy");
  --streams;
  // What it was given goes on.
  std::thread([ending = static_cast<Stream*>(stream)] { delete ending; }).detach();
  return error;
}
EXPORT int cuStreamQuery(void* stream) {
  ENTER("cuStreamQuery");
  return ignores("cuStreamQuery") || of(stream).is_idle() ? 0 : kNotReady;
}
EXPORT int cuStreamSynchronize(void*) {
  ENTER("cuStreamSynchronize", true);
  die("cuStreamSynchronize is not used");
}
EXPORT int cuEventCreate(void** event, unsigned flags) {
  ENTER("cuEventCreate");
  need_context("cuEventCreate");
  if (flags != 2) die("an event that takes the time");
  ++events;
  *event = new Event;
  return 0;
}
EXPORT int cuEventDestroy_v2(void* event) {
  const int error = enter("cuEventDestroy");
  --events;
  delete static_cast<Event*>(event);
  return error;
}
EXPORT int cuEventRecord(void* event, void* stream) {
  ENTER("cuEventRecord");
  need_context("cuEventRecord");
  if (!ignores("cuEventRecord")) static_cast<Event*>(event)->record(of(stream));
  return 0;
}
EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  ENTER("cuStreamWaitEvent");
  need_context("cuStreamWaitEvent");
  if (!ignores("cuStreamWaitEvent")) static_cast<Event*>(event)->make_wait(of(stream));
  return 0;
}
EXPORT int cuEventQuery(void* event) {
  ENTER("cuEventQuery");
  return ignores("cuEventQuery") || static_cast<Event*>(event)->is_over() ? 0 : kNotReady;
}
EXPORT int cuMemAlloc_v2(uint64_t* pointer, size_t n) {
  ENTER("cuMemAlloc", true);
  need_context("cuMemAlloc");
  *pointer = fake_allocate(n, current.back());
  return 0;
}
EXPORT int cuMemFree_v2(uint64_t pointer) {
  const int error = enter("cuMemFree", true);
  need_context("cuMemFree");
  fake_free(pointer);
  return error;
}
EXPORT int cuMemHostRegister_v2(void* data, size_t n, unsigned flags) {
  if (const int error = enter("cuMemHostRegister", true); error != 0) {
    pageable = true;
    return error;
  }
  need_context("cuMemHostRegister");
  if ((flags & 1) == 0) die("memory is pinned for this context only");
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (begin % 4096 != 0 || n % 4096 != 0) die("cuMemHostRegister of parts of pages");
  const std::lock_guard lock(world);
  return pinned.emplace(begin, n).second ? 0 : kAlreadyPinned;
}
EXPORT int cuMemHostUnregister(void* data) {
  const int error = enter("cuMemHostUnregister", true);
  size_t n = 0;
  {
    const std::lock_guard lock(world);
    const auto it = pinned.find(reinterpret_cast<uintptr_t>(data));
    if (it == pinned.end()) return kNotPinned;
    n = it->second;
    pinned.erase(it);
  }
  Copies::all().end_those_of(data, n, "memory of the host is unpinned while it is copied");
  return error;
}
EXPORT int cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t n, void* stream) {
  ENTER("cuMemcpyDtoHAsync");
  const std::byte* from = behind(device, n);
  return copy("cuMemcpyDtoHAsync", stream, static_cast<std::byte*>(host), from, n, host, from);
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t device, const void* host, size_t n, void* stream) {
  ENTER("cuMemcpyHtoDAsync");
  std::byte* to = behind(device, n);
  if (back_hangs) of(stream).push([] { hang(); });
  if (slow_back) of(stream).push([] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  return copy("cuMemcpyHtoDAsync", stream, to, static_cast<const std::byte*>(host), n, host, to);
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void* stream) {
  ENTER("cuMemcpyDtoDAsync");
  need_context("cuMemcpyDtoDAsync");
  std::byte* target = behind(to, n);
  const std::byte* source = behind(from, n);
  if (target == nullptr || source == nullptr) die("cuMemcpyDtoDAsync of memory that is not the device's");
  Copies& all = Copies::all();
  of(stream).push([=, &all, copy = all.begin(target, source, n)] {
    std::memcpy(target, source, n);
    if (no_number) std::memset(target, 0xff, n);
    all.end(copy);
  });
  return 0;
}
EXPORT int cuStreamWriteValue64_v2(void* stream, uint64_t pointer, unsigned long long value, unsigned) {
  ENTER("cuStreamWriteValue64");
  of(stream).push([flag = flag_at(pointer), value] { *flag = value; });
  return 0;
}
EXPORT int cuStreamWaitValue64_v2(void* stream, uint64_t pointer, unsigned long long value, unsigned flags) {
  ENTER("cuStreamWaitValue64");
  if (flags != 0) die("cuStreamWaitValue64 for something else than >=");
  of(stream).push([flag = flag_at(pointer), value] {
    while (static_cast<int64_t>(flag->load() - value) < 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return 0;
}
EXPORT int cuMemHostGetDevicePointer_v2(uint64_t* pointer, void* host, unsigned) {
  ENTER("cuMemHostGetDevicePointer");
  *pointer = reinterpret_cast<uint64_t>(host);
  return 0;
}
EXPORT int cuCtxRecordEvent(void*, void* event) {
  ENTER("cuCtxRecordEvent");
  const std::lock_guard lock(world);
  auto& all = static_cast<Event*>(event)->of_all;
  all = std::vector<fake::Event>(Stream::all().size());
  for (size_t i = 0; i < all.size(); ++i) all[i].record(*Stream::all()[i]);
  return 0;
}
EXPORT int cuCtxWaitEvent(void*, void* event) {
  ENTER("cuCtxWaitEvent");
  const std::lock_guard lock(world);
  for (const auto& one : static_cast<Event*>(event)->of_all)
    for (Stream* stream : Stream::all()) one.make_wait(*stream);
  return 0;
}
EXPORT int cuIpcGetMemHandle(char* handle, uint64_t pointer) {
  ENTER("cuIpcGetMemHandle");
  Exported exported{getpid(), 0, current.back(), 0};
  exported.file = memory.file_of(pointer, exported.nbytes);
  if (exported.file < 0) return kInvalidValue;
  std::memset(handle, 0, 64);
  std::memcpy(handle, &exported, sizeof exported);
  return 0;
}
struct IpcHandle {
  char bytes[64];
};
EXPORT int cuIpcOpenMemHandle_v2(uint64_t* pointer, IpcHandle handle, unsigned) {
  ENTER("cuIpcOpenMemHandle");
  Exported exported;
  std::memcpy(&exported, handle.bytes, sizeof exported);
  if (exported.process == getpid()) return 201;  // CUDA_ERROR_INVALID_CONTEXT: not in the process that has it
  void* found = memory.import(exported.process, exported.file, exported.nbytes, exported.device);
  *pointer = reinterpret_cast<uint64_t>(found);
  return found == nullptr ? kInvalidValue : 0;
}
EXPORT int cuIpcCloseMemHandle(uint64_t pointer) {
  ENTER("cuIpcCloseMemHandle");
  memory.free(reinterpret_cast<void*>(pointer));
  return 0;
}
EXPORT int cuMemsetD32Async(uint64_t device, unsigned value, size_t n, void* stream) {
  ENTER("cuMemsetD32Async");
  need_context("cuMemsetD32Async");
  std::byte* to = behind(device, 4 * n);
  if (to == nullptr) die("cuMemsetD32Async of memory that is not the device's");
  of(stream).push([=] {
    for (size_t i = 0; i < n; ++i) std::memcpy(to + 4 * i, &value, 4);
  });
  return 0;
}
EXPORT int cuPointerGetAttribute(void* value, int attribute, uint64_t pointer) {
  ENTER("cuPointerGetAttribute");
  int device = current.empty() ? first_device.load() : current.back();  // of memory that only a framework knows
  if (memory.behind(pointer, 1, &device) == nullptr && !any_pointer) return kInvalidValue;
  if (attribute == 2)
    *static_cast<unsigned*>(value) = 2;
  else if (attribute == 9)
    *static_cast<int*>(value) = device - first_device;
  else
    die("an attribute that is not known here");
  return 0;
}
