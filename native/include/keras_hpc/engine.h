// SPDX-License-Identifier: Apache-2.0
// The engine's C interface: what a framework's operations call inside a training step, and what a program without
// Python needs to make teams of its own (examples/c/two_teams.c).
//
// A plan is a fixed list of tensors that a team of ranks reduces together, once per step. One execution of a plan is
// khpc_start of each of its tensors, as soon as each exists and in any order, and then khpc_wait of each. Ranks never
// negotiate at run time: buckets are cut when the plan is made, and the sum is always taken in rank order, so results
// are bit-identical on all ranks and from run to run.
//
// Every function that returns int returns KHPC_OK on success. Otherwise khpc_last_error() tells what went wrong. After
// an error of communication the team is of no more use, and the engine no longer touches what it was given: the program
// may go on with that memory, free the team and make another one. A process that was forked from a rank is none: every
// call is an error there.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KHPC_API __attribute__((visibility("default")))

enum { KHPC_OK = 0, KHPC_ERROR = 1, KHPC_BLOCKING = 2 };

// Starts the reduction, in place, of one tensor of a plan. `data` must stay valid until khpc_wait has returned for
// this tensor, with or without an error, and holds undefined values in between. `weight` is this rank's share in a
// weighted mean (its number of samples, >= 0), the same for all tensors of one execution; a rank with weight 0 takes
// part, but its values are not read. Plans that are not weighted ignore it. Thread-safe.
KHPC_API int khpc_start(int plan, int tensor, void* data, double weight);

// Blocks until the tensor's `data` holds the result. Thread-safe.
KHPC_API int khpc_wait(int plan, int tensor);

// After khpc_start of all tensors of the plan: returns at once and calls `done(arg, error)` exactly once, from the
// communication thread or from the one that met the error, when every tensor holds its result (error is NULL) or the
// execution failed (error says why). If it returns something else than KHPC_OK it never calls `done`: KHPC_BLOCKING
// means that the team has no communication thread; use khpc_wait then.
KHPC_API int khpc_wait_all_async(int plan, void (*done)(void* arg, const char* error), void* arg);

// For pipelined plans, whose steps may apply the average of the step before (see engine/pipeline.hpp). How many updates
// the step makes that has been started, 0 to 2; always 1 for others; -1 on error.
KHPC_API int khpc_updates(int plan);

// The second of two updates: blocks until its average is known, and copies it. Of every tensor, or of all at once as
// khpc_wait_all_async does.
KHPC_API int khpc_second(int plan, int tensor, void* data);
KHPC_API int khpc_second_async(int plan, void* const* data, void (*done)(void* arg, const char* error), void* arg);

// For plans of weights with local steps (see engine/local_steps.hpp). A step begins, with so many samples of this rank:
// returns what it has to do, bits of LocalSteps::Mode, or -1 on error. Where it says so, the step gives the weights
// before its update to khpc_local_anchor, and after its update starts and waits for all tensors of the plan.
KHPC_API int khpc_local_begin(int plan, double samples);
KHPC_API int khpc_local_anchor(int plan, int tensor, const void* weights);

// Plans whose tensors are on a GPU, where `stream` is one of the framework's (a CUstream). A tensor is started after
// what the stream has been given so far, and belongs to the engine until the stream has waited. `weight`: as for
// khpc_start, a float or double (4 or 8 bytes) on the GPU; null: 1. Returns at once. Thread-safe.
KHPC_API int khpc_start_on(int plan, int tensor, void* data, const void* weight, int weight_nbytes, void* stream);

// The same for frameworks that show no streams: of what the GPU has computed already. It is copied to `lent`, memory of
// the GPU whose mean is there after khpc_wait_on and khpc_finish_on, and which lives until khpc_give_back(loan).
KHPC_API int khpc_lend(int plan, int tensor, const void* data, double weight, void** lent, void** loan);
KHPC_API void khpc_give_back(void* loan);

// After khpc_start_on of all tensors: blocks until all are reduced. What the stream is given from then on finds the
// results. khpc_second_on does as khpc_second, of all tensors; khpc_write_updates writes what khpc_updates returns, an
// int32_t, into memory of the GPU; khpc_finish_on blocks until the default stream (null) has done what it was given.
KHPC_API int khpc_wait_on(int plan, void* stream);
KHPC_API int khpc_second_on(int plan, void* const* data, void* stream);
KHPC_API int khpc_write_updates(int plan, void* to, void* stream);
KHPC_API int khpc_finish_on(int plan);

// khpc_allreduce_tensor of memory of a GPU, which this process knows by the number `device`. Blocks.
KHPC_API int khpc_allreduce_on(int team, int device, void* data, const int64_t* shape, int rank, const char* dtype,
                               const char* op, const char* what, void* stream);

// Exchanges of rows of an axis that is split among the ranks of a team (see engine/exchange.hpp), and their adjoints.
// A tensor is (outer, rows, inner) elements of `dtype`. Forward it has the rows of the exchange's owner, and the result
// those of its window; with `adjoint` the other way round. `inner` leaves out what a row of the window is padded by.
// All ranks start the same exchanges in the same order, with the same outer, inner and dtype, and wait for them in that
// order. `data` must stay valid until khpc_exchange_wait has returned, with or without an error; it blocks until
// `result`, other memory, is there.
KHPC_API int khpc_exchange_start(int exchange, int adjoint, const void* data, int64_t outer, int64_t inner,
                                 const char* dtype);
KHPC_API int khpc_exchange_wait(int exchange, int adjoint, void* result);

// Rows that this rank has, rows of its window, and by how many cells of the next axis each of these is padded; -1 if
// there is no such exchange.
KHPC_API int64_t khpc_exchange_rows(int exchange);
KHPC_API int64_t khpc_exchange_window(int exchange);
KHPC_API int64_t khpc_exchange_cells(int exchange);

// Number of tensors of a plan, or -1 if there is no such plan.
KHPC_API int khpc_plan_tensors(int plan);

// Size of one tensor in bytes, or -1 if there is no such tensor.
KHPC_API int64_t khpc_plan_nbytes(int plan, int tensor);

// Whether the memory of a tensor is only read from its start to its wait, and so may be somebody else's, too: 1 or 0,
// or -1 if there is no such tensor.
KHPC_API int khpc_plan_only_reads(int plan, int tensor);

// Collective on the team; block. Gather one count, or a buffer of `nbytes` bytes, of every rank, in rank order.
KHPC_API int khpc_allgather_counts(int team, int64_t mine, int64_t* counts);
KHPC_API int khpc_allgatherv(int team, const void* in, int64_t nbytes, void* out, const int64_t* nbytes_by_rank);

// Collective; blocks. Reduces a buffer in place, as keras_hpc.allreduce does: its shape and `what`, a name of who
// calls, must be the same on all ranks, too. For `dtype` and `op` see khpc_allreduce.
KHPC_API int khpc_allreduce_tensor(int team, void* data, const int64_t* shape, int rank, const char* dtype,
                                   const char* op, const char* what);

// Number of ranks of a team, or -1 if there is no such team.
KHPC_API int khpc_team_size(int team);

// ---- Teams without Python. Include mpi.h before this header, initialize MPI with MPI_THREAD_MULTIPLE, and link to
// nothing but this library and MPI.

// What differs between MPI libraries; khpc_mpi_of() fills it in. Handles are sign-extended.
typedef struct {
  int handle_size;
  intptr_t comm, byte, errors_return, status_ignore, in_place, float32, float64, int32, int64, sum;
  int size;
  const int* node_of_rank;  // any number per host
  int thread_level, thread_multiple;
} khpc_mpi;

// Collective over the ranks of `mpi`. Returns the team, or -1. `threads`: communication threads, or 0 if start and wait
// make the progress. A wait that takes longer than `timeout_seconds` is an error.
KHPC_API int khpc_team_create(const khpc_mpi* mpi, int threads, double timeout_seconds);

// Collective. Frees the team with its plans; arrays of khpc_empty stay. Whatever still waits in another thread returns
// with an error, and completions of khpc_wait_all_async that are outstanding are called with one. Not from `done`.
KHPC_API int khpc_team_free(int team);

// Collective. Sums, averages, ... `count` elements in place and returns when it is done. `dtype`: "float32", "float64",
// "float16", "bfloat16", "int32", "int64"; `op`: "sum", "mean", "min", "max", "product".
KHPC_API int khpc_allreduce(int team, void* data, int64_t count, const char* dtype, const char* op);

// Collective. Returns zeroed memory that the ranks of the node can reach directly, so that khpc_allreduce of it or of a
// part copies nothing; NULL on error. khpc_empty_free gives it back. Other ranks write results into it: after an error
// they may do so until they have met it, too.
KHPC_API void* khpc_empty(int team, int64_t nbytes);
KHPC_API int khpc_empty_free(void* data);

// Collective. Returns a plan for `count` tensors, in the order in which their values become known, or -1.
KHPC_API int khpc_plan_create(int team, const char* name, int count, const char* const* tensors,
                              const char* const* dtypes, const int64_t* elements, const char* op, int weighted);

#ifdef MPI_VERSION
#include <stdlib.h>
#include <string.h>
// Collective over `comm`. Free node_of_rank with free().
static inline khpc_mpi khpc_mpi_of(MPI_Comm comm) {
  khpc_mpi m;
  MPI_Comm node;
  int rank, leader;
  int* nodes;
  memset(&m, 0, sizeof m);
  MPI_Query_thread(&m.thread_level);
  m.thread_multiple = MPI_THREAD_MULTIPLE;
  m.handle_size = (int)sizeof comm;
  m.comm = (intptr_t)comm;  // a number or a pointer, by library
  m.errors_return = (intptr_t)MPI_ERRORS_RETURN;
  m.sum = (intptr_t)MPI_SUM;
  m.byte = (intptr_t)MPI_BYTE;
  m.float32 = (intptr_t)MPI_FLOAT;
  m.float64 = (intptr_t)MPI_DOUBLE;
  m.int32 = (intptr_t)MPI_INT32_T;
  m.int64 = (intptr_t)MPI_INT64_T;
  m.status_ignore = (intptr_t)MPI_STATUS_IGNORE;
  m.in_place = (intptr_t)MPI_IN_PLACE;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &m.size);
  MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  leader = rank;
  MPI_Bcast(&leader, 1, MPI_INT, 0, node);
  MPI_Comm_free(&node);
  nodes = (int*)malloc((size_t)m.size * sizeof(int));
  MPI_Allgather(&leader, 1, MPI_INT, nodes, 1, MPI_INT, comm);
  m.node_of_rank = nodes;
  return m;
}
#endif

// The calling thread's last error, one or more sentences. Valid until its next failing call.
KHPC_API const char* khpc_last_error(void);

#ifdef __cplusplus
}
#endif
