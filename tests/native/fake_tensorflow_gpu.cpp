// A device of type "GPU" for TensorFlow without one, by its StreamExecutor C interface, which
// load_pluggable_device_library takes. So TensorFlow does with our operations what it does on a GPU: it places them,
// and copies their arguments and results between host and device, on streams of its own that run late.
#include <dlfcn.h>

#include <cstring>

#include "fake_gpu.hpp"
#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/c/kernels.h"

struct SP_Stream_st : fake::Stream {};
struct SP_Event_st : fake::Event {};
struct SP_Timer_st {};

namespace {

// TensorFlow runs its own operations for any kind of device on the host, such as a variable's update: they touch it.
fake::Memory memory(PROT_READ | PROT_WRITE);

// Also memory of the engine's, of the fake driver.
std::byte* behind(uintptr_t pointer, uint64_t n) {
  if (std::byte* found = memory.behind(pointer, n)) return found;
  void* symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "fake_behind");
  void* (*of_driver)(uint64_t, size_t);
  std::memcpy(&of_driver, &symbol, sizeof symbol);
  return static_cast<std::byte*>(of_driver(pointer, n));
}

std::byte* of(const SP_DeviceMemoryBase* base, uint64_t n) {
  std::byte* found = behind(reinterpret_cast<uintptr_t>(base->opaque), n);
  if (found == nullptr) fake::die("TensorFlow uses memory that is not the device's");
  return found;
}

// Waits for a copy that TensorFlow wants at once.
void now(const std::function<void()>& work) {
  fake::Stream stream;
  stream.push(work);
  stream.finish();
}

void fill_executor(SP_StreamExecutor& e) {
  e.struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  e.allocate = [](const SP_Device* device, uint64_t n, int64_t, SP_DeviceMemoryBase* base) {
    base->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
    base->opaque = memory.allocate(n, device->ordinal);
    base->size = n;
  };
  e.deallocate = [](const SP_Device*, SP_DeviceMemoryBase* base) {
    if (base->opaque != nullptr) memory.free(base->opaque);
    base->opaque = nullptr;
    base->size = 0;
  };
  e.host_memory_allocate = [](const SP_Device*, uint64_t n) { return std::aligned_alloc(64, (n + 63) / 64 * 64); };
  e.host_memory_deallocate = [](const SP_Device*, void* p) { std::free(p); };
  e.get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return 0; };
  e.device_memory_usage = [](const SP_Device*, int64_t* free, int64_t* total) -> TF_Bool {
    *free = *total = int64_t{1} << 30;
    return 1;
  };
  e.create_stream = [](const SP_Device*, SP_Stream* stream, TF_Status*) { *stream = new SP_Stream_st; };
  e.destroy_stream = [](const SP_Device*, SP_Stream stream) { delete stream; };
  e.create_stream_dependency = [](const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status*) {
    fake::Event event;
    event.record(*other);
    event.make_wait(*dependent);
  };
  e.get_stream_status = [](const SP_Device*, SP_Stream, TF_Status*) {};
  e.create_event = [](const SP_Device*, SP_Event* event, TF_Status*) { *event = new SP_Event_st; };
  e.destroy_event = [](const SP_Device*, SP_Event event) { delete event; };
  e.get_event_status = [](const SP_Device*, SP_Event event) {
    return event->is_over() ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
  };
  e.record_event = [](const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) { event->record(*stream); };
  e.wait_for_event = [](const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) { event->make_wait(*stream); };
  e.create_timer = [](const SP_Device*, SP_Timer* timer, TF_Status*) { *timer = new SP_Timer_st; };
  e.destroy_timer = [](const SP_Device*, SP_Timer timer) { delete timer; };
  e.start_timer = e.stop_timer = [](const SP_Device*, SP_Stream, SP_Timer, TF_Status*) {};
  e.memcpy_dtoh = [](const SP_Device*, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from, uint64_t n,
                     TF_Status*) {
    stream->push([to, source = of(from, n), n] { std::memcpy(to, source, n); });
  };
  e.memcpy_htod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from, uint64_t n,
                     TF_Status*) {
    stream->push([target = of(to, n), from, n] { std::memcpy(target, from, n); });
  };
  e.memcpy_dtod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                     uint64_t n, TF_Status*) {
    stream->push([target = of(to, n), source = of(from, n), n] { std::memcpy(target, source, n); });
  };
  e.sync_memcpy_dtoh = [](const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t n, TF_Status*) {
    now([&] { std::memcpy(to, of(from, n), n); });
  };
  e.sync_memcpy_htod = [](const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t n, TF_Status*) {
    now([&] { std::memcpy(of(to, n), from, n); });
  };
  e.sync_memcpy_dtod = [](const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, uint64_t n,
                          TF_Status*) { now([&] { std::memcpy(of(to, n), of(from, n), n); }); };
  e.block_host_for_event = [](const SP_Device*, SP_Event event, TF_Status*) { event->await(); };
  e.block_host_until_done = [](const SP_Device*, SP_Stream stream, TF_Status*) { stream->finish(); };
  e.synchronize_all_activity = [](const SP_Device*, TF_Status*) {};
  e.mem_zero = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, uint64_t n, TF_Status*) {
    stream->push([target = of(to, n), n] { std::memset(target, 0, n); });
  };
  e.memset = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, uint8_t value, uint64_t n, TF_Status*) {
    stream->push([target = of(to, n), value, n] { std::memset(target, value, n); });
  };
  e.memset32 = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, uint32_t value, uint64_t n, TF_Status*) {
    stream->push([target = of(to, n), value, n] {
      for (uint64_t i = 0; i + 4 <= n; i += 4) std::memcpy(target + i, &value, 4);
    });
  };
  e.host_callback = [](const SP_Device*, SP_Stream stream, SE_StatusCallbackFn function, void* argument) -> TF_Bool {
    stream->push([function, argument] { function(argument, nullptr); });
    return 1;
  };
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <class F>
F* of_tensorflow(F*, const char* name) {
  for (const char* library : {"libtensorflow_framework.so.2", "libtensorflow_cc.so.2"})
    if (void* found = dlsym(dlopen(library, RTLD_LAZY | RTLD_NOLOAD), name)) return reinterpret_cast<F*>(found);
  fake::die(std::string("TensorFlow has no ") + name);
}
#define TF(name) of_tensorflow(&TF_##name, "TF_" #name)

// The squares of a tensor, late: nothing but what has come after them on a stream says that they are there.
void square(void*, TF_OpKernelContext* context) {
  constexpr int most_dims = 8;
  TF_Status* status = TF(NewStatus)();
  TF_Tensor *x = nullptr, *y = nullptr;
  TF(GetInput)(context, 0, &x, status);
  int64_t dims[most_dims];
  const int rank = TF(NumDims)(x);
  for (int axis = 0; axis < rank; ++axis) dims[axis] = TF(Dim)(x, axis);
  const size_t n = TF(TensorByteSize)(x);
  y = TF(AllocateOutput)(context, 0, TF_FLOAT, dims, rank, n, status);
  const auto* from = reinterpret_cast<float*>(behind(reinterpret_cast<uintptr_t>(TF(TensorData)(x)), n));
  auto* to = reinterpret_cast<float*>(behind(reinterpret_cast<uintptr_t>(TF(TensorData)(y)), n));
  TF(GetStream)(context, status)->push([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (size_t i = 0; i < n / sizeof(float); ++i) to[i] = from[i] * from[i];
  });
  TF(DeleteTensor)(x);
  TF(DeleteTensor)(y);
  TF(DeleteStatus)(status);
}

}  // namespace

// The only operation of its own: what else is computed on it, is ours, or TensorFlow computes it elsewhere.
EXPORT void TF_InitKernel() {
  TF_Status* status = TF(NewStatus)();
  TF_KernelBuilder* builder = TF(NewKernelBuilder)("Square", "GPU", nullptr, square, nullptr);
  TF(KernelBuilder_TypeConstraint)(builder, "T", TF_FLOAT, status);
  TF(RegisterKernelBuilder)("FakeSquare", builder, status);
  if (TF(GetCode)(status) != TF_OK) fake::die(TF(Message)(status));
  TF(DeleteStatus)(status);
}

EXPORT void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  SP_Platform& platform = *params->platform;
  platform.struct_size = SP_PLATFORM_STRUCT_SIZE;
  platform.name = "FAKE";
  platform.type = "GPU";
  platform.supports_unified_memory = 0;
  platform.use_bfc_allocator = 1;
  platform.force_memory_growth = 1;
  SP_PlatformFns& f = *params->platform_fns;
  f.struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  f.get_device_count = [](const SP_Platform*, int* count, TF_Status*) { *count = 2; };
  f.create_device = [](const SP_Platform*, SE_CreateDeviceParams* made, TF_Status*) {
    made->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    made->device->ordinal = made->ordinal;
    made->device->hardware_name = "Fake GPU";
    made->device->device_vendor = "fake";
    made->device->pci_bus_id = "0000:00:00.0";
  };
  f.destroy_device = [](const SP_Platform*, SP_Device*) {};
  f.create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* made, TF_Status*) {
    made->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
  };
  f.destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  f.create_stream_executor = [](const SP_Platform*, SE_CreateStreamExecutorParams* made, TF_Status*) {
    fill_executor(*made->stream_executor);
  };
  f.destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  f.create_timer_fns = [](const SP_Platform*, SP_TimerFns* made, TF_Status*) {
    made->nanoseconds = [](SP_Timer) -> uint64_t { return 0; };
  };
  f.destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
}
