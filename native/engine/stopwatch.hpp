// SPDX-License-Identifier: Apache-2.0
// Times ways to allreduce one buffer of float32, for `python -m keras_hpc bench` and for choosing among them.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/team.hpp"

namespace keras_hpc {

class Stopwatch {
 public:
  // Collective. `tensors` > 0: also as so many tensors of about equal size, packed and unpacked ("fusion"). With
  // `wire`, ours are rounded to its 16 bits between nodes.
  Stopwatch(Team& team, size_t nbytes, int tensors, std::optional<DType> wire);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;

  // What is timed:
  //   private        an array of the process, on the path that the engine chooses
  //   segment        an array of keras_hpc.empty, likewise
  //   fusion         a plan of many tensors: start each, wait for each
  //   mpi            MPI_Allreduce in place
  //   mpi fusion     pack, MPI_Allreduce in place, unpack
  //   mpi nonblocking  MPI_Iallreduce in place, tested until done
  //   floor          b = a += b for half of the elements: what an allreduce of two ranks must move, without any waiting
  // and "private PATH" or "segment PATH" for a path of one's choice (slot, push, staged, library).
  bool can(const std::string& way) const;

  // The path that the engine chooses for a way, and how slices go between nodes, for people to read.
  std::string chosen(const std::string& way) const;

  // Collective. Runs it once on known values; false if the result is wrong.
  bool verify(const std::string& way);

  // Collective. Seconds that one operation takes on this rank, `repeats` times. Each rank rewrites its data before
  // every operation, outside the measured time: a gradient is new each time. With `batch` > 1, for operations that are
  // shorter than the clock is fine, so many are timed in a row, and the time of rewriting alone is taken off.
  std::vector<double> time(const std::string& way, int repeats, int batch);

 private:
  struct Memory;
  std::function<void()> operation(const std::string& way);
  float* data_of(const std::string& way) const;
  void rewrite(float* data, float value) const;
  void meet();

  Team& team_;
  size_t count_;
  std::optional<DType> wire_;
  std::unique_ptr<Memory> memory_;
  std::shared_ptr<Plan> plan_;
  std::vector<size_t> begins_;  // of the plan's tensors, and the end
  std::unique_ptr<Channel> channel_;
  float value_ = 0;
};

}  // namespace keras_hpc
