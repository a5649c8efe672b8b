// What the C interface says to arguments that are not as it wants them, and that completions are called exactly once;
// built and run by tests/test_living_on.py.
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "keras_hpc/engine.h"

static int failures = 0, called = 0;
static char said[400];

static void expect(int right, const char* what) {
  if (right) return;
  printf("wrong: %s (%s)\n", what, khpc_last_error());
  ++failures;
}

static void done(void* arg, const char* error) {
  (void)arg;
  ++called;
  snprintf(said, sizeof said, "%s", error ? error : "no error");
}

int main(int argc, char** argv) {
  int level, rank;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  khpc_mpi mpi = khpc_mpi_of(MPI_COMM_WORLD);

  const char* names[] = {"a", "b"};
  const char* types[] = {"float32", "float32"};
  const int64_t sizes[] = {1000, 0}, negative[] = {-1000, 0}, huge[] = {INT64_C(1) << 40, INT64_C(1) << 40};
  static float a[1000];
  khpc_mpi single = mpi;
  single.thread_level = MPI_THREAD_SERIALIZED;
  expect(khpc_team_create(&single, 0, 20) == -1 && strstr(khpc_last_error(), "MPI_THREAD_MULTIPLE"), "thread level");
  expect(khpc_team_create(NULL, 0, 20) == -1, "no MPI");
  expect(khpc_team_create(&mpi, -1, 20) == -1, "threads");
  expect(khpc_team_create(&mpi, 0, NAN) == -1, "time limit");

  int team = khpc_team_create(&mpi, 1, 20);
  expect(team >= 0, "a team");
  expect(khpc_plan_create(team, "p", 1, names, types, negative, "sum", 0) == -1, "a negative number of elements");
  expect(khpc_plan_create(team, NULL, 1, names, types, sizes, "sum", 0) == -1, "a plan without a name");
  expect(khpc_plan_create(team, "p", 1, names, types, NULL, "sum", 0) == -1, "a plan without sizes");
  expect(khpc_plan_create(team, "p", 0, names, types, sizes, "sum", 0) == -1, "a plan without tensors");
  expect(khpc_allreduce(team, a, -1, "float32", "sum") == KHPC_ERROR, "a negative array");
  expect(khpc_allreduce(team, NULL, 1, "float32", "sum") == KHPC_ERROR, "an array that is nowhere");
  expect(khpc_allreduce(team, a, 1, NULL, "sum") == KHPC_ERROR, "a dtype that is nowhere");
  expect(khpc_allreduce_tensor(team, a, NULL, 1, "float32", "sum", "x") == KHPC_ERROR, "a shape that is nowhere");
  expect(khpc_allreduce_tensor(team, a, negative, 1, "float32", "sum", "x") == KHPC_ERROR, "a negative shape");
  expect(khpc_allreduce(team, a, INT64_MAX, "float32", "sum") == KHPC_ERROR, "an array that is too large");
  expect(khpc_allreduce_tensor(team, a, huge, 2, "float32", "sum", "x") == KHPC_ERROR, "a shape that is too large");
  expect(khpc_allgather_counts(team, 1, NULL) == KHPC_ERROR, "counts that are nowhere");
  expect(khpc_allgatherv(team, a, 4, a, negative) == KHPC_ERROR, "negative counts");
  expect(khpc_empty(team, -1) == NULL, "a negative area");
  expect(!khpc_empty(team, 4096 * (rank + 1)) && strstr(khpc_last_error(), "differ"), "areas of different sizes");
  expect(khpc_empty_free(a) == KHPC_ERROR && khpc_team_free(77) == KHPC_ERROR, "what nobody has made");
  int plan = khpc_plan_create(team, "p", 2, names, types, sizes, "sum", 1);
  expect(plan >= 0, "a plan");
  expect(khpc_start(plan, 0, NULL, 1) == KHPC_ERROR, "a tensor that is nowhere");
  expect(khpc_start(plan, 0, a, -1) == KHPC_ERROR && khpc_start(plan, 0, a, NAN) == KHPC_ERROR, "a weight");
  expect(khpc_start(plan, 0, a, INFINITY) == KHPC_ERROR, "a weight that is not finite");
  expect(khpc_start(plan, 2, a, 1) == KHPC_ERROR && khpc_start(plan + 1, 0, a, 1) == KHPC_ERROR, "no such tensor");
  expect(khpc_wait_all_async(plan, NULL, NULL) == KHPC_ERROR, "no completion");

  // After all that the team is as good as new.
  a[0] = 1;
  khpc_start(plan, 0, a, 1);
  khpc_start(plan, 1, NULL, 1);
  expect(khpc_wait(plan, 0) == KHPC_OK && khpc_wait(plan, 1) == KHPC_OK && a[0] == 2, "a sum");

  // One rank waits for an execution that the other never starts, and frees the team.
  if (rank == 0) {
    khpc_start(plan, 0, a, 1);
    khpc_start(plan, 1, NULL, 1);
    expect(khpc_wait_all_async(plan, done, NULL) == KHPC_OK, "a completion is accepted");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  expect(khpc_team_free(team) == KHPC_OK, "the team is freed");
  expect(called == (rank == 0), "each completion is called once");
  expect(rank != 0 || strstr(said, "closed") || strstr(said, "left"), said);
  expect(khpc_start(plan, 0, a, 1) == KHPC_ERROR && khpc_team_size(team) == -1, "use after free");

  // And again.
  team = khpc_team_create(&mpi, 0, 20);
  a[0] = 1;
  expect(khpc_allreduce(team, a, 1, "float32", "sum") == KHPC_OK && a[0] == 2, "another team");
  expect(khpc_team_free(team) == KHPC_OK, "it is freed");
  free((void*)mpi.node_of_rank);
  if (failures == 0) printf("rank %d: as expected\n", rank);
  fflush(stdout);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  return failures != 0;
}
