// SPDX-License-Identifier: Apache-2.0
#include "common/control_group.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

namespace keras_hpc {
namespace {

constexpr uint64_t kNoLimit = uint64_t{1} << 60;  // version 1 writes some number beyond it

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool holds(const std::string& list, const std::string& item) {
  const auto items = split(list, ',');
  return std::find(items.begin(), items.end(), item) != items.end();
}

// The number that a file begins with; false where there is none, as "max".
bool read(const std::string& path, double& value) {
  std::ifstream file(path);
  return static_cast<bool>(file >> value);
}

double statistic(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string key;
  for (double value = 0; file >> key >> value;)
    if (key == name) return value;
  return 0;
}

// Folders of the group that has this controller, from the innermost one up to where it is mounted.
std::vector<std::string> folders(const std::string& root, const std::string& controller, bool& second_version) {
  std::string group, group_of_second;
  bool found = false, found_second = false;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t names = line.find(':'), path = line.find(':', names + 1);
    if (names == std::string::npos || path == std::string::npos) continue;
    const std::string list = line.substr(names + 1, path - names - 1);
    if (list.empty()) {
      found_second = true;
      group_of_second = line.substr(path + 1);
    } else if (holds(list, controller)) {
      found = true;
      group = line.substr(path + 1);
    }
  }
  second_version = !found;
  if (!found && !found_second) return {};
  if (second_version) group = group_of_second;

  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto left = split(line.substr(0, dash), ' '), right = split(line.substr(dash + 3), ' ');
    if (left.size() < 5 || right.empty()) continue;
    if (second_version ? right[0] != "cgroup2" : right[0] != "cgroup" || !holds(right.back(), controller)) continue;
    // Where a container sees a part of the tree only, its paths begin there.
    std::string inside = left[3] == "/"                       ? group
                         : group.rfind(left[3] + "/", 0) == 0 ? group.substr(left[3].size())
                                                              : "";
    std::vector<std::string> found_folders;
    while (inside.size() > 1) {
      found_folders.push_back(root + left[4] + inside);
      inside.erase(inside.rfind('/'));
    }
    found_folders.push_back(root + left[4]);
    return found_folders;
  }
  return {};
}

}  // namespace

ControlGroup ControlGroup::mine(const std::string& root) {
  ControlGroup group;
  bool second = true;
  for (const std::string& folder : folders(root, "memory", second)) {
    double limit = 0, used = 0;
    if (!read(folder + (second ? "/memory.max" : "/memory.limit_in_bytes"), limit) || limit >= kNoLimit) continue;
    group.memory_limit = std::min(group.memory_limit, static_cast<uint64_t>(limit));
    if (!read(folder + (second ? "/memory.current" : "/memory.usage_in_bytes"), used)) continue;
    used -= statistic(folder + "/memory.stat", second ? "inactive_file" : "total_inactive_file");
    group.memory_left = std::min(group.memory_left, static_cast<uint64_t>(std::max(limit - used, 0.0)));
  }
  for (const std::string& folder : folders(root, "cpu", second)) {
    double quota = 0, period = 0;
    if (second) {
      std::ifstream file(folder + "/cpu.max");
      if (!(file >> quota >> period)) continue;
    } else if (!read(folder + "/cpu.cfs_quota_us", quota) || !read(folder + "/cpu.cfs_period_us", period)) {
      continue;
    }
    if (quota <= 0 || period <= 0 || quota / period >= group.cores) continue;
    group.cores = quota / period;
    struct stat place{};
    if (stat(folder.c_str(), &place) == 0) group.cores_of = static_cast<uint64_t>(place.st_ino);
  }
  return group;
}

}  // namespace keras_hpc
