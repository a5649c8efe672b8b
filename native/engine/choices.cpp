// SPDX-License-Identifier: Apache-2.0
#include "engine/choices.hpp"

#include "common/error.hpp"

namespace keras_hpc {
namespace {

constexpr const char* kPlaces[] = {"private", "segment", "network", "device"};

Path parse_device_path(const std::string& name) {
  for (const Path path : {Path::staged, Path::peer, Path::nccl, Path::hierarchical, Path::mpi})
    if (name == name_of(path)) return path;
  throw Error("Unknown way of a plan on GPUs. Expected staged, peer, nccl, hierarchical or mpi. Received: " + name);
}

}  // namespace

const char* name_of(Path path) {
  constexpr const char* names[] = {"slot", "push",         "staged", "library", "peer",
                                   "nccl", "hierarchical", "mpi",    "unknown"};
  return names[static_cast<size_t>(path)];
}

Path parse_path(const std::string& name) {
  for (const Path path : {Path::slot, Path::push, Path::staged, Path::library})
    if (name == name_of(path)) return path;
  throw Error("Unknown path of an allreduce. Expected slot, push, staged or library. Received: " + name);
}

void Choices::add(const Choice& choice) {
  const std::lock_guard lock(mutex_);
  choices_.insert(choices_.begin(), choice);
}

void Choices::add(const Named& choice) {
  for (const Place place : {Place::own, Place::segment, Place::network, Place::device}) {
    if (choice.place != kPlaces[static_cast<size_t>(place)]) continue;
    const int way = place == Place::network  ? static_cast<int>(parse_algorithm(choice.way))
                    : place == Place::device ? static_cast<int>(parse_device_path(choice.way))
                                             : static_cast<int>(parse_path(choice.way));
    return add({place, choice.from, choice.to, way});
  }
  throw Error("Unknown place of data. Expected private, segment, network or device. Received: " + choice.place);
}

std::optional<int> Choices::find(Place place, size_t nbytes) const {
  const std::lock_guard lock(mutex_);
  for (const Choice& c : choices_)
    if (c.place == place && nbytes >= c.from && nbytes < c.to) return c.way;
  return std::nullopt;
}

std::optional<Path> Choices::path(Place place, size_t nbytes) const {
  const std::optional<int> way = find(place, nbytes);
  return way ? std::optional(static_cast<Path>(*way)) : std::nullopt;
}

std::optional<Algorithm> Choices::algorithm(size_t nbytes) const {
  const std::optional<int> way = find(Place::network, nbytes);
  return way ? std::optional(static_cast<Algorithm>(*way)) : std::nullopt;
}

std::vector<Choices::Named> Choices::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<Named> named;
  for (const Choice& c : choices_)
    named.push_back(
        {kPlaces[static_cast<size_t>(c.place)], c.from, c.to,
         c.place == Place::network ? name_of(static_cast<Algorithm>(c.way)) : name_of(static_cast<Path>(c.way))});
  return named;
}

}  // namespace keras_hpc
