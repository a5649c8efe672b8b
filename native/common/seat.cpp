// SPDX-License-Identifier: Apache-2.0
#include "common/seat.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "common/control_group.hpp"

namespace keras_hpc {
namespace {

// The group in which the kernel shares out time among this process and others, if it has such groups.
int64_t my_scheduler_group() {
  long long number = 0;
  if (std::FILE* file = std::fopen("/proc/self/autogroup", "r")) {
    if (std::fscanf(file, "/autogroup-%lld", &number) != 1) number = 0;
    std::fclose(file);
  }
  return number;
}

}  // namespace

Cores Cores::mine() {
  Cores cores;
  std::memset(&cores, 0, sizeof cores);
  if (sched_getaffinity(0, sizeof cores.sets, cores.sets) != 0)  // not known: as many as there are
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i)
      CPU_SET_S(i, sizeof cores.sets, cores.sets);
  return cores;
}

Seat Seat::mine() {
  const ControlGroup group = ControlGroup::mine();
  return {Cores::mine(), my_scheduler_group(), group.cores, group.cores_of};
}

Patience patience_of(const Seat* seats, int ranks) {
  Cores all = seats[0].cores;
  bool same_group = true;
  std::map<uint64_t, double> quotas;
  for (int r = 0; r < ranks; ++r) {
    all.add(seats[r].cores);
    same_group = same_group && seats[r].scheduler_group == seats[0].scheduler_group;
    quotas[seats[r].quota_of] = seats[r].quota;
  }
  double cores = 0;
  for (const auto& [group_of_cores, quota] : quotas) cores += quota;
  cores = std::min(cores, static_cast<double>(all.count()));
  return patience_for(ranks, static_cast<int>(cores), same_group);
}

}  // namespace keras_hpc
