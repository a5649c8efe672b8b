// SPDX-License-Identifier: Apache-2.0
#include "mpi/library.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "common/error.hpp"
#include "common/process.hpp"

namespace keras_hpc::mpi {
namespace {

std::atomic<bool> failed{false};

template <class Handle>
Handle to_handle(intptr_t value) {
  if constexpr (sizeof(Handle) == sizeof(int))
    return static_cast<Handle>(value);
  else
    return reinterpret_cast<Handle>(value);
}

// The functions used, with the signatures of the MPI standard. Handle: int or void*.
template <class Handle>
struct Functions {
  int (*Comm_rank)(Handle, int*);
  int (*Comm_size)(Handle, int*);
  int (*Comm_dup)(Handle, Handle*);
  int (*Comm_split)(Handle, int, int, Handle*);
  int (*Comm_free)(Handle*);
  int (*Comm_set_errhandler)(Handle, Handle);
  int (*Isend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*Irecv)(void*, int, Handle, int, int, Handle, Handle*);
  int (*Ibcast)(void*, int, Handle, int, Handle, Handle*);
  int (*Iallgatherv)(const void*, int, Handle, void*, const int*, const int*, Handle, Handle, Handle*);
  int (*Ibarrier)(Handle, Handle*);
  int (*Allreduce)(const void*, void*, int, Handle, Handle, Handle);
  int (*Iallreduce)(const void*, void*, int, Handle, Handle, Handle, Handle*);
  int (*Test)(Handle*, int*, void*);
  int (*Cancel)(Handle*);
  int (*Error_string)(int, char*, int*);
  int (*Finalized)(int*);
  // Extensions, which not all have.
  int (*Query_gpu)(int, int*) = nullptr;
  int (*Query_cuda)() = nullptr;

  explicit Functions(void* module) {
    bind(module, Comm_rank, "MPI_Comm_rank");
    bind(module, Comm_size, "MPI_Comm_size");
    bind(module, Comm_dup, "MPI_Comm_dup");
    bind(module, Comm_split, "MPI_Comm_split");
    bind(module, Comm_free, "MPI_Comm_free");
    bind(module, Comm_set_errhandler, "MPI_Comm_set_errhandler");
    bind(module, Isend, "MPI_Isend");
    bind(module, Irecv, "MPI_Irecv");
    bind(module, Ibcast, "MPI_Ibcast");
    bind(module, Iallgatherv, "MPI_Iallgatherv");
    bind(module, Ibarrier, "MPI_Ibarrier");
    bind(module, Allreduce, "MPI_Allreduce");
    bind(module, Iallreduce, "MPI_Iallreduce");
    bind(module, Test, "MPI_Test");
    bind(module, Cancel, "MPI_Cancel");
    bind(module, Error_string, "MPI_Error_string");
    bind(module, Finalized, "MPI_Finalized");
    bind_if_there(module, Query_gpu, "MPIX_GPU_query_support");
    bind_if_there(module, Query_cuda, "MPIX_Query_cuda_support");
  }

  void check(int code, const char* call) const {
    if (code == 0) return;  // MPI_SUCCESS is 0 in every ABI
    failed = true;
    char text[2048] = {};
    int length = 0;
    Error_string(code, text, &length);
    throw NetworkError(std::string(call) + ": " + text);
  }

 private:
  template <class Function>
  static void bind_if_there(void* module, Function& function, const char* name) {
    void* symbol = dlsym(module, name);
    std::memcpy(&function, &symbol, sizeof symbol);
  }
  template <class Function>
  static void bind(void* module, Function& function, const char* name) {
    bind_if_there(module, function, name);
    if (function == nullptr) throw Error(std::string("The MPI library behind mpi4py has no function ") + name + ".");
  }
};

template <class Handle>
class RequestOf final : public Request {
 public:
  RequestOf(const Functions<Handle>& f, const Constants& constants)
      : f_(f), status_ignore_(reinterpret_cast<void*>(constants.status_ignore)) {}

  bool test() override {
    int finished = 0;
    f_.check(f_.Test(&handle, &finished, status_ignore_), "MPI_Test");
    return finished != 0;
  }
  bool cancel() override {
    int finalized = 0;
    if (!is_receive || f_.Finalized(&finalized) != 0 || finalized != 0) return false;
    f_.check(f_.Cancel(&handle), "MPI_Cancel");
    return test();
  }

  Handle handle{};
  bool is_receive = false;
  std::vector<int> counts, displacements;  // must outlive the call that uses them

 private:
  const Functions<Handle>& f_;
  void* status_ignore_;
};

template <class Handle>
class CommunicatorOf final : public Communicator {
 public:
  // Owns `comm`.
  CommunicatorOf(std::shared_ptr<const Functions<Handle>> functions, const Constants& constants, Handle comm,
                 std::shared_ptr<std::atomic<bool>> is_kept = std::make_shared<std::atomic<bool>>(false))
      : functions_(std::move(functions)),
        f_(*functions_),
        constants_(constants),
        comm_(comm),
        is_kept_(std::move(is_kept)) {
    f_.check(f_.Comm_set_errhandler(comm_, to_handle<Handle>(constants_.errors_return)), "MPI_Comm_set_errhandler");
  }
  ~CommunicatorOf() override {
    if (fork_depth() != depth_ || *is_kept_) return;  // it is the parent's, or nobody's any more
    int finalized = 0;
    if (f_.Finalized(&finalized) == 0 && finalized == 0) f_.Comm_free(&comm_);
  }

  void keep() override { *is_kept_ = true; }
  int rank() const override {
    int rank = 0;
    f_.check(f_.Comm_rank(comm_, &rank), "MPI_Comm_rank");
    return rank;
  }
  int size() const override {
    int size = 0;
    f_.check(f_.Comm_size(comm_, &size), "MPI_Comm_size");
    return size;
  }
  std::unique_ptr<Communicator> duplicate() const override {
    Handle made{};
    f_.check(f_.Comm_dup(comm_, &made), "MPI_Comm_dup");
    return std::make_unique<CommunicatorOf>(functions_, constants_, made, is_kept_);
  }
  std::unique_ptr<Communicator> split(int color, int key) const override {
    Handle made{};
    f_.check(f_.Comm_split(comm_, color, key, &made), "MPI_Comm_split");
    return std::make_unique<CommunicatorOf>(functions_, constants_, made, is_kept_);
  }
  RequestPtr send(const void* data, int count, int peer, int tag) override {
    auto request = make_request();
    f_.check(f_.Isend(data, count, byte(), peer, tag, comm_, &request->handle), "MPI_Isend");
    return request;
  }
  RequestPtr receive(void* data, int count, int peer, int tag) override {
    auto request = make_request();
    request->is_receive = true;
    f_.check(f_.Irecv(data, count, byte(), peer, tag, comm_, &request->handle), "MPI_Irecv");
    return request;
  }
  RequestPtr broadcast(void* data, int count, int root) override {
    auto request = make_request();
    f_.check(f_.Ibcast(data, count, byte(), root, comm_, &request->handle), "MPI_Ibcast");
    return request;
  }
  RequestPtr allgather(const void* in, int count, void* out, std::vector<int> counts) override {
    auto request = make_request();
    request->counts = std::move(counts);
    int place = 0;
    for (const int c : request->counts) {
      request->displacements.push_back(place);
      place += c;
    }
    f_.check(f_.Iallgatherv(in, count, byte(), out, request->counts.data(), request->displacements.data(), byte(),
                            comm_, &request->handle),
             "MPI_Iallgatherv");
    return request;
  }
  RequestPtr barrier() override {
    auto request = make_request();
    f_.check(f_.Ibarrier(comm_, &request->handle), "MPI_Ibarrier");
    return request;
  }
  bool can_allreduce(DType dtype, Op op) const override {
    return constants_.dtypes.count(dtype) != 0 && constants_.ops.count(op) != 0;
  }
  void allreduce(void* data, int count, DType dtype, Op op) override {
    f_.check(f_.Allreduce(in_place(), data, count, handle(constants_.dtypes, dtype), handle(constants_.ops, op), comm_),
             "MPI_Allreduce");
  }
  RequestPtr iallreduce(void* data, int count, DType dtype, Op op) override {
    auto request = make_request();
    f_.check(f_.Iallreduce(in_place(), data, count, handle(constants_.dtypes, dtype), handle(constants_.ops, op), comm_,
                           &request->handle),
             "MPI_Iallreduce");
    return request;
  }
  bool takes_device_memory() const override {
    constexpr int cuda = 0;  // MPIX_GPU_SUPPORT_CUDA
    int answer = 0;
    if (f_.Query_gpu != nullptr) return f_.Query_gpu(cuda, &answer) == 0 && answer != 0;
    if (f_.Query_cuda != nullptr) return f_.Query_cuda() == 1;
    // Cray's has neither in some versions.
    const char* cray = std::getenv("MPICH_GPU_SUPPORT_ENABLED");
    return cray != nullptr && std::strcmp(cray, "1") == 0;
  }

 private:
  std::unique_ptr<RequestOf<Handle>> make_request() const {
    return std::make_unique<RequestOf<Handle>>(f_, constants_);
  }
  Handle byte() const { return to_handle<Handle>(constants_.byte); }
  const void* in_place() const { return reinterpret_cast<const void*>(constants_.in_place); }
  template <class Key>
  static Handle handle(const std::map<Key, intptr_t>& handles, Key key) {
    return to_handle<Handle>(handles.at(key));
  }

  std::shared_ptr<const Functions<Handle>> functions_;
  const Functions<Handle>& f_;
  Constants constants_;
  Handle comm_;
  const std::shared_ptr<std::atomic<bool>> is_kept_;
  const int depth_ = fork_depth();
};

template <class Handle>
std::unique_ptr<Communicator> connect_as(void* module, intptr_t handle, const Constants& constants) {
  // Kept for the life of the process: requests of a job that is ending may still refer to it.
  static const auto functions = std::make_shared<const Functions<Handle>>(module);
  Handle made{};
  functions->check(functions->Comm_dup(to_handle<Handle>(handle), &made), "MPI_Comm_dup");
  return std::make_unique<CommunicatorOf<Handle>>(functions, constants, made);
}

}  // namespace

bool has_failed() {
  return failed;
}

std::unique_ptr<Communicator> connect(const std::string& module_path, int handle_size, intptr_t handle,
                                      const Constants& constants) {
  void* module = dlopen(module_path.empty() ? nullptr : module_path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (module == nullptr) throw Error("mpi4py.MPI is not loaded from " + module_path + ".");
  if (handle_size == sizeof(int)) return connect_as<int>(module, handle, constants);
  if (handle_size == sizeof(void*)) return connect_as<void*>(module, handle, constants);
  throw Error("Unknown MPI ABI: handles of " + std::to_string(handle_size) + " bytes.");
}

}  // namespace keras_hpc::mpi
