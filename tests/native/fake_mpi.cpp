// An MPI library of two ranks in one process: the other one does what this one does, so it sends what this one sends.
// Of its calls any may fail, as those of a library that has lost a rank. For tests/test_mpi_errors.py.
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Comm {
  int number;
};
struct Request {
  void* data;  // of a receive; null: it has finished
  std::pair<int, int> place;
};

std::mutex mutex;
std::map<std::pair<int, int>, std::deque<std::vector<char>>> messages;  // (communicator, tag)
std::string failing;
int left = -1;  // calls before the one that fails
int comms = 0;
Comm world{0};
constexpr int kNewsBytes = 12;  // of engine/news.hpp: no other receive has so many
std::pair<int, int> news;
auto copy = +[](void* to, const void* from, size_t n) { std::memcpy(to, from, n); };

// Call it with the mutex held.
int fails(const char* call) {
  return failing == call && left-- == 0;
}

int begin(Request** request, void* data, int tag, const Comm* comm, const char* call) {
  const std::lock_guard lock(mutex);
  if (fails(call)) return 1;
  *request = new Request{data, {comm->number, tag}};
  return 0;
}

}  // namespace

extern "C" {

void* fake_mpi_world() {
  return &world;
}
void fake_mpi_fail(const char* call, int after) {
  const std::lock_guard lock(mutex);
  failing = call;
  left = after;
}
int fake_mpi_has_failed() {
  const std::lock_guard lock(mutex);
  return left < 0;
}
// How messages are copied: those of memory that the host cannot reach, too.
void fake_mpi_copy(void (*function)(void*, const void*, size_t)) {
  copy = function;
}
// What the other rank tells of a team that cannot go on.
void fake_mpi_tell(const char* item, int nbytes) {
  const std::lock_guard lock(mutex);
  messages[news].emplace_back(item, item + nbytes);
}

int MPI_Comm_rank(Comm*, int* rank) {
  return *rank = 0;
}
int MPI_Comm_size(Comm*, int* size) {
  *size = 2;
  return 0;
}
int MPI_Comm_dup(Comm*, Comm** made) {
  const std::lock_guard lock(mutex);
  *made = new Comm{++comms};
  return 0;
}
int MPI_Comm_split(Comm* comm, int, int, Comm** made) {
  return MPI_Comm_dup(comm, made);
}
int MPI_Comm_free(Comm** comm) {
  delete *comm;
  return 0;
}
int MPI_Comm_set_errhandler(Comm*, void*) {
  return 0;
}
int MPI_Isend(const char* data, int count, void*, int, int tag, Comm* comm, Request** request) {
  const int error = begin(request, nullptr, tag, comm, "MPI_Isend");
  const std::lock_guard lock(mutex);
  if (error != 0) return error;
  auto& sent = messages[{comm->number, tag}].emplace_back(count);
  copy(sent.data(), data, sent.size());
  return 0;
}
int MPI_Irecv(void* data, int count, void*, int, int tag, Comm* comm, Request** request) {
  if (count == kNewsBytes) news = {comm->number, tag};
  return begin(request, data, tag, comm, "MPI_Irecv");
}
int MPI_Ibcast(void*, int, void*, int, Comm* comm, Request** request) {
  return begin(request, nullptr, 0, comm, "MPI_Ibcast");
}
int MPI_Iallgatherv(const void* in, int count, void*, char* out, const int*, const int* places, void*, Comm* comm,
                    Request** request) {
  for (int rank = 0; rank < 2; ++rank) std::memcpy(out + places[rank], in, static_cast<size_t>(count));
  return begin(request, nullptr, 0, comm, "MPI_Iallgatherv");
}
int MPI_Ibarrier(Comm* comm, Request** request) {
  return begin(request, nullptr, 0, comm, "MPI_Ibarrier");
}
int MPI_Allreduce(const void*, void*, int, void*, void*, Comm*) {
  return 1;
}
int MPI_Iallreduce(const void*, void*, int, void*, void*, Comm*, Request**) {
  return 1;
}
// A request that has finished, with an error or without, is one that has finished whenever it is asked again.
int MPI_Test(Request** request, int* has_finished, void*) {
  const std::lock_guard lock(mutex);
  Request* one = *request;
  int error = 0;
  *has_finished = 1;
  if (one == nullptr) return 0;
  if (one->data != nullptr) {
    auto& come = messages[one->place];
    *has_finished = !come.empty();
    if (come.empty()) return 0;
    error = fails("MPI_Test");
    if (error == 0) copy(one->data, come.front().data(), come.front().size());
    come.pop_front();
  }
  delete one;
  *request = nullptr;
  return error;
}
int MPI_Cancel(Request** request) {
  if (*request == nullptr) return 1;
  (*request)->data = nullptr;
  return 0;
}
int MPI_Error_string(int, char* text, int* length) {
  std::strcpy(text, "this library has failed");
  *length = static_cast<int>(std::strlen(text));
  return 0;
}
int MPI_Finalized(int* flag) {
  return *flag = 0;
}

}  // extern "C"
