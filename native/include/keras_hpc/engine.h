// SPDX-License-Identifier: Apache-2.0
// The engine's C interface: what a framework's operations call inside a training step.
//
// A plan is a fixed list of tensors that a team of ranks reduces together, once per step. One execution of a plan is
// khpc_start of each of its tensors, as soon as each exists and in any order, and then khpc_wait of each. Ranks never
// negotiate at run time: buckets are cut when the plan is made, and the sum is always taken in rank order, so results
// are bit-identical on all ranks and from run to run.
//
// Every function that returns int returns KHPC_OK on success. Otherwise khpc_last_error() tells what went wrong.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KHPC_API __attribute__((visibility("default")))

enum { KHPC_OK = 0, KHPC_ERROR = 1, KHPC_BLOCKING = 2 };

// Starts the reduction, in place, of one tensor of a plan. `data` must stay valid until khpc_wait has returned for
// this tensor, and holds undefined values in between. `weight` is this rank's share in a weighted mean (its number of
// samples, >= 0), the same for all tensors of one execution; a rank with weight 0 takes part, but its values are not
// read. Plans that are not weighted ignore it. Thread-safe.
KHPC_API int khpc_start(int plan, int tensor, void* data, double weight);

// Blocks until the tensor's `data` holds the result. Thread-safe.
KHPC_API int khpc_wait(int plan, int tensor);

// After khpc_start of all tensors of the plan: returns at once and calls `done(arg, error)` exactly once, from the
// communication thread, when every tensor holds its result (error is NULL) or the execution failed (error says why).
// Returns KHPC_BLOCKING, and never calls `done`, if the team has no communication thread: use khpc_wait then.
KHPC_API int khpc_wait_all_async(int plan, void (*done)(void* arg, const char* error), void* arg);

// Number of tensors of a plan, or -1 if there is no such plan.
KHPC_API int khpc_plan_tensors(int plan);

// Size of one tensor in bytes, or -1 if there is no such tensor.
KHPC_API int64_t khpc_plan_nbytes(int plan, int tensor);

// Collective on the team; block. Gather one count, or a buffer of `nbytes` bytes, of every rank, in rank order.
KHPC_API int khpc_allgather_counts(int team, int64_t mine, int64_t* counts);
KHPC_API int khpc_allgatherv(int team, const void* in, int64_t nbytes, void* out, const int64_t* nbytes_by_rank);

// Number of ranks of a team, or -1 if there is no such team.
KHPC_API int khpc_team_size(int team);

// The calling thread's last error, one or more sentences. Valid until its next failing call.
KHPC_API const char* khpc_last_error(void);

#ifdef __cplusplus
}
#endif
