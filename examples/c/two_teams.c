// SPDX-License-Identifier: Apache-2.0
// The engine without Python: two teams reduce at the same time, one by plans as a training step does, the other by
// calls. See README.md beside it for how to build and run it.
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>

#include "keras_hpc/engine.h"

enum { STEPS = 100, KERNEL = 300000, BIAS = 64, SHARED = 1 << 20 };

static int rank, size;

static void check(int ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "rank %d: %s: %s\n", rank, what, khpc_last_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

// A training step's gradients: start each as soon as it exists, wait for each before it is used.
static void* train(void* argument) {
  static float kernel[KERNEL], bias[BIAS];
  const char* names[] = {"bias", "kernel"};
  const char* dtypes[] = {"float32", "float32"};
  const int64_t elements[] = {BIAS, KERNEL};
  const int team = *(int*)argument;
  const int plan = khpc_plan_create(team, "gradients", 2, names, dtypes, elements, "mean", 0);
  check(plan >= 0, "khpc_plan_create");
  for (int step = 0; step < STEPS; ++step) {
    for (int i = 0; i < BIAS; ++i) bias[i] = (float)(rank + step);
    check(khpc_start(plan, 0, bias, 1.0) == KHPC_OK, "khpc_start");
    for (int i = 0; i < KERNEL; ++i) kernel[i] = (float)(rank + i % 10);
    check(khpc_start(plan, 1, kernel, 1.0) == KHPC_OK, "khpc_start");
    check(khpc_wait(plan, 0) == KHPC_OK && khpc_wait(plan, 1) == KHPC_OK, "khpc_wait");
    const float mean = 0.5f * (float)(size - 1);
    check(bias[BIAS - 1] == mean + (float)step && kernel[KERNEL - 1] == mean + (KERNEL - 1) % 10, "a mean is wrong");
  }
  return NULL;
}

int main(int argc, char** argv) {
  int level;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  if (level < MPI_THREAD_MULTIPLE) {
    fprintf(stderr, "This MPI library offers no MPI_THREAD_MULTIPLE.\n");
    return 1;
  }
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  khpc_mpi mpi = khpc_mpi_of(MPI_COMM_WORLD);
  int first = khpc_team_create(&mpi, 1, 60), second = khpc_team_create(&mpi, 0, 60);
  free((void*)mpi.node_of_rank);
  check(first >= 0 && second >= 0, "khpc_team_create");

  pthread_t trainer;
  pthread_create(&trainer, NULL, train, &first);
  float* array = (float*)khpc_empty(second, SHARED * (int64_t)sizeof(float));
  check(array != NULL, "khpc_empty");
  for (int step = 0; step < STEPS; ++step) {
    for (int i = 0; i < SHARED; ++i) array[i] = (float)(rank + i % 5);
    check(khpc_allreduce(second, array, SHARED, "float32", "sum") == KHPC_OK, "khpc_allreduce");
    check(array[SHARED - 1] == (float)(size * (size - 1) / 2 + size * ((SHARED - 1) % 5)), "a sum is wrong");
  }
  pthread_join(trainer, NULL);

  check(khpc_allreduce(second, array, 1, "float32", "median") == KHPC_ERROR, "an unknown operation was accepted");
  if (rank == 0) printf("%d ranks, two teams, %d steps each: correct. An error: %s\n", size, STEPS, khpc_last_error());
  check(khpc_empty_free(array) == KHPC_OK, "khpc_empty_free");
  check(khpc_team_free(first) == KHPC_OK && khpc_team_free(second) == KHPC_OK, "khpc_team_free");
  MPI_Finalize();
  return 0;
}
