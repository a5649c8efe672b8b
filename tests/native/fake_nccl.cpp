// A libnccl.so.2 without GPUs, of the functions that the engine calls, on the streams of the fake libcuda.so.1.
//
// Ranks, threads or processes, meet in memory that they share. As with the real one, a rank that is not there lets the
// others' kernels hang until they are aborted, and what ranks call must be the same, in the same order: else the
// process ends. Sums are taken in rank order and rounded to the type at each step, as on a ring.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_nccl_numbers.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace fake_nccl;

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5,
              kInProgress = 7;
constexpr int kSum = 0, kFirstProduct = 5;
constexpr int kMostRanks = 8;
constexpr size_t kSlotBytes = 64 << 10;

struct Id {
  char name[128];
};

// Of the fake driver.
template <class Function>
Function* of_driver(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  void* found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) die(std::string("the fake driver has no ") + name);
  return reinterpret_cast<Function*>(found);
}

enum class Kind { all_reduce, reduce_scatter, all_gather };

struct Call {
  Kind kind;
  size_t count;  // all_gather: of each rank
  int dtype;
  bool multiplies;
};

struct Shared {
  std::atomic<int> joined;
  int device[kMostRanks];
  std::atomic<uint64_t> arrived[kMostRanks], done[kMostRanks];
  Call call[kMostRanks];
  alignas(64) std::byte slot[kMostRanks][kSlotBytes];
};

void nap() {
  std::this_thread::sleep_for(std::chrono::microseconds(20));
}

struct Product {
  double factor;
  int dtype;
  bool destroyed;
};

struct Comm {
  Comm(const Id& id, int rank, int size) : rank(rank), size(size) {
    const int file = shm_open(id.name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) die("no shared memory");
    shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
  }
  ~Comm() { munmap(shared, sizeof(Shared)); }
  const int rank, size;
  Shared* shared;
  uint64_t turn = 0;  // of the stream's thread
  std::atomic<bool> aborted{false};
  std::atomic<int> under_way{0};
  std::vector<Product> products;
};

std::mutex world;
std::map<void*, std::shared_ptr<Comm>> comms;
std::string failing;
int failing_after = 0;
int broken_rank = -1, broken_result = 0;
std::atomic<int> epoch{0};  // who waits since an earlier one gives up
std::map<std::string, int> calls;
std::atomic<bool> narrow{false};
std::atomic<bool> taken[kMostRanks];

int enter(const char* name) {
  const std::lock_guard lock(world);
  ++calls[name];
  return failing == name && failing_after-- == 0 ? kInternalError : kSuccess;
}

std::shared_ptr<Comm> find(void* handle) {
  const std::lock_guard lock(world);
  const auto it = comms.find(handle);
  if (it == comms.end()) die("a communicator that is not there");
  return it->second;
}

struct Kernel {
  std::shared_ptr<Comm> comm;
  std::byte* data;
  Call call;
  double factor;
};

// False: aborted.
bool await(const Comm& comm, const std::atomic<uint64_t>* counters, uint64_t value) {
  for (int r = 0; r < comm.size; ++r)
    for (; counters[r] < value; nap())
      if (comm.aborted) return false;
  return true;
}

// What rank r has put into its slot is the values from `begin` on, `n` of them.
void take(const Kernel& kernel, size_t begin, size_t n) {
  const Comm& comm = *kernel.comm;
  const Shared& shared = *comm.shared;
  const int dtype = kernel.call.dtype;
  const size_t size = size_of(dtype);
  if (kernel.call.kind == Kind::all_gather) {
    for (int r = 0; r < comm.size; ++r)
      std::memcpy(kernel.data + (static_cast<size_t>(r) * kernel.call.count + begin) * size, shared.slot[r], n * size);
    return;
  }
  std::byte* data = kernel.data + begin * size;
  const size_t each = kernel.call.count / static_cast<size_t>(comm.size);
  for (size_t i = 0; i < n; ++i) {
    std::memcpy(data + i * size, shared.slot[0] + i * size, size);
    for (int r = 1; r < comm.size; ++r)
      put(dtype, data + i * size, number(dtype, data + i * size) + number(dtype, shared.slot[r] + i * size));
    // The other ranks' parts of what is scattered are of no use to this one.
    if (kernel.call.kind == Kind::reduce_scatter && (begin + i) / each != static_cast<size_t>(comm.rank))
      std::memset(data + i * size, 0xff, size);
  }
}

void reduce(const Kernel& kernel) {
  Comm& comm = *kernel.comm;
  Shared& shared = *comm.shared;
  const int dtype = kernel.call.dtype;
  const size_t size = size_of(dtype), at_once = kSlotBytes / size;
  for (size_t begin = 0; begin < kernel.call.count; begin += at_once, ++comm.turn) {
    const size_t n = std::min(at_once, kernel.call.count - begin);
    const size_t mine = kernel.call.kind == Kind::all_gather ? static_cast<size_t>(comm.rank) * kernel.call.count : 0;
    const std::byte* data = kernel.data + (mine + begin) * size;
    if (!await(comm, shared.done, comm.turn)) return;
    for (size_t i = 0; i < n; ++i)
      put(dtype, shared.slot[comm.rank] + i * size, number(dtype, data + i * size) * kernel.factor);
    shared.call[comm.rank] = kernel.call;
    shared.arrived[comm.rank] = comm.turn + 1;
    if (!await(comm, shared.arrived, comm.turn + 1)) return;
    for (int r = 0; r < comm.size; ++r) {
      const Call& other = shared.call[r];
      if (other.kind != kernel.call.kind || other.count != kernel.call.count || other.dtype != dtype ||
          other.multiplies != kernel.call.multiplies)
        die("ranks make different calls");
    }
    take(kernel, begin, n);
    shared.done[comm.rank] = comm.turn + 1;
  }
}

// Room on a device for the kernel of one communicator.
class Room {
 public:
  explicit Room(const Comm& comm) : taken_(narrow ? &taken[comm.shared->device[comm.rank]] : nullptr) {
    while (taken_ != nullptr && taken_->exchange(true)) {
      if (comm.aborted) taken_ = nullptr;
      nap();
    }
  }
  ~Room() {
    if (taken_ != nullptr) *taken_ = false;
  }

 private:
  std::atomic<bool>* taken_;
};

void run(void* argument) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(argument));
  const Room room(*kernel->comm);
  if (!kernel->comm->aborted) reduce(*kernel);
  --kernel->comm->under_way;
}

int push(const Call& call, const void* memory, size_t count, int op, void* handle, void* stream) {
  const auto comm = find(handle);
  double factor = 1;
  if (op >= kFirstProduct) {
    const auto index = static_cast<size_t>(op - kFirstProduct);
    if (index >= comm->products.size()) return kInvalidArgument;
    const Product& product = comm->products[index];
    if (product.destroyed || product.dtype != call.dtype) return kInvalidArgument;
    factor = product.factor;
  } else if (op != kSum) {
    die("an operation that is not known here");
  }
  void* data = of_driver<void*(uint64_t, size_t)>("fake_behind")(reinterpret_cast<uint64_t>(memory),
                                                                 count * size_of(call.dtype));
  if (data == nullptr) die("memory that is not the device's is to be reduced");
  ++comm->under_way;
  auto* kernel = new Kernel{comm, static_cast<std::byte*>(data), call, factor};
  of_driver<void(void*, void (*)(void*), void*)>("fake_push")(stream, &run, kernel);
  return kSuccess;
}

void check_in_place(const void* whole, const void* part, size_t each, int dtype, void* handle) {
  const size_t before = static_cast<size_t>(find(handle)->rank) * each * size_of(dtype);
  if (static_cast<const std::byte*>(whole) + before != part) die("only parts in place are known here");
}

}  // namespace

// ---- what tests tell it

EXPORT void fake_nccl_reset() {
  const std::lock_guard lock(world);
  failing = "";
  broken_rank = -1;
  calls.clear();
  narrow = false;
  ++epoch;
}
// From now on devices have room for one kernel at a time, as NCCL's documentation warns of.
EXPORT void fake_nccl_narrow() {
  narrow = true;
}
// The call number `after`, from 0, of a function fails.
EXPORT void fake_nccl_fail(const char* name, int after) {
  const std::lock_guard lock(world);
  failing = name;
  failing_after = after;
}
// What this rank has under way is said to have failed.
EXPORT void fake_nccl_break(int rank, int result) {
  const std::lock_guard lock(world);
  broken_rank = rank;
  broken_result = result;
}
EXPORT int fake_nccl_calls(const char* name) {
  const std::lock_guard lock(world);
  return calls[name];
}
EXPORT int fake_nccl_left() {
  const std::lock_guard lock(world);
  return static_cast<int>(comms.size());
}

// ---- the library

EXPORT int ncclGetVersion(int* version) {
  *version = 23004;
  return enter("ncclGetVersion");
}
EXPORT const char* ncclGetErrorString(int result) {
  return result == kInternalError  ? "internal error"
         : result == kInvalidUsage ? "invalid usage"
         : result == kSystemError  ? "unhandled system error"
                                   : "invalid argument";
}
EXPORT int ncclGetUniqueId(Id* id) {
  static std::atomic<int> next{0};
  if (const int error = enter("ncclGetUniqueId"); error != 0) return error;
  *id = {};
  std::snprintf(id->name, sizeof id->name, "/fake-nccl-%d-%d", getpid(), next++);
  return kSuccess;
}
EXPORT int ncclCommInitRank(void** handle, int size, Id id, int rank) {
  if (const int error = enter("ncclCommInitRank"); error != 0) return error;
  if (size > kMostRanks || rank < 0 || rank >= size) return kInvalidArgument;
  const auto comm = std::make_shared<Comm>(id, rank, size);
  comm->shared->device[rank] = of_driver<int()>("fake_current_device")();
  ++comm->shared->joined;
  const int now = epoch;
  while (comm->shared->joined < size) {
    nap();
    if (epoch == now) continue;
    shm_unlink(id.name);  // also where some rank never comes
    return kSystemError;
  }
  shm_unlink(id.name);
  const char* may_share = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  for (int r = 0; r < size && (may_share == nullptr || *may_share == '0'); ++r)
    if (r != rank && comm->shared->device[r] == comm->shared->device[rank]) return kInvalidUsage;
  const std::lock_guard lock(world);
  comms[comm.get()] = comm;
  *handle = comm.get();
  return kSuccess;
}
EXPORT int ncclCommDestroy(void* handle) {
  const int error = enter("ncclCommDestroy");
  if (find(handle)->under_way > 0) die("a communicator is destroyed that has something under way");
  const std::lock_guard lock(world);
  comms.erase(handle);
  return error;
}
EXPORT int ncclCommAbort(void* handle) {
  const int error = enter("ncclCommAbort");
  find(handle)->aborted = true;
  const std::lock_guard lock(world);
  comms.erase(handle);
  return error;
}
EXPORT int ncclCommGetAsyncError(void* handle, int* result) {
  if (const int error = enter("ncclCommGetAsyncError"); error != 0) return error;
  const auto comm = find(handle);
  const std::lock_guard lock(world);
  *result = comm->rank == broken_rank ? broken_result : comm->under_way > 0 ? kInProgress : kSuccess;
  return kSuccess;
}
EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int dtype, int op, void* handle, void* stream) {
  if (const int error = enter("ncclAllReduce"); error != 0) return error;
  if (from != to) die("only sums in place are known here");
  return push({Kind::all_reduce, count, dtype, op >= kFirstProduct}, to, count, op, handle, stream);
}
EXPORT int ncclReduceScatter(const void* from, void* to, size_t each, int dtype, int op, void* handle, void* stream) {
  if (const int error = enter("ncclReduceScatter"); error != 0) return error;
  const size_t all = each * static_cast<size_t>(find(handle)->size);
  check_in_place(from, to, each, dtype, handle);
  return push({Kind::reduce_scatter, all, dtype, op >= kFirstProduct}, from, all, op, handle, stream);
}
EXPORT int ncclAllGather(const void* from, void* to, size_t each, int dtype, void* handle, void* stream) {
  if (const int error = enter("ncclAllGather"); error != 0) return error;
  const size_t all = each * static_cast<size_t>(find(handle)->size);
  check_in_place(to, from, each, dtype, handle);
  return push({Kind::all_gather, each, dtype, false}, to, all, kSum, handle, stream);
}
EXPORT int ncclRedOpCreatePreMulSum(int* op, const void* factor, int dtype, int where, void* handle) {
  if (const int error = enter("ncclRedOpCreatePreMulSum"); error != 0) return error;
  if (where != 1) die("a factor on the device is not known here");
  const auto comm = find(handle);
  *op = kFirstProduct + static_cast<int>(comm->products.size());
  comm->products.push_back({number(dtype, static_cast<const std::byte*>(factor)), dtype, false});
  return kSuccess;
}
EXPORT int ncclRedOpDestroy(int op, void* handle) {
  if (const int error = enter("ncclRedOpDestroy"); error != 0) return error;
  find(handle)->products.at(static_cast<size_t>(op - kFirstProduct)).destroyed = true;
  return kSuccess;
}
