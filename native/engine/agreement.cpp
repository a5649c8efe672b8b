// SPDX-License-Identifier: Apache-2.0
// Whether all ranks of a team want the same, and if not, where they first differ.
#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "common/error.hpp"
#include "common/index.hpp"
#include "engine/team.hpp"

namespace keras_hpc {

std::string joined(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

void Team::agree(const std::string& what, const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += item + '\n';
  const std::vector<int64_t> hashes = allgather_count(static_cast<int64_t>(std::hash<std::string>{}(text)));
  if (std::all_of(hashes.begin(), hashes.end(), [&](int64_t hash) { return hash == hashes[0]; })) return;

  // They differ, so every rank gets here: fetch all lists and find the first difference.
  const std::vector<int64_t> lengths = allgather_count(static_cast<int64_t>(text.size()));
  const std::vector<size_t> nbytes(lengths.begin(), lengths.end());
  std::string all(std::accumulate(nbytes.begin(), nbytes.end(), size_t{0}), '\0');
  allgather(text.data(), all.data(), nbytes);
  std::vector<std::vector<std::string>> lists;
  size_t place = 0;
  for (const size_t length : nbytes) {
    std::vector<std::string>& list = lists.emplace_back();
    for (const size_t end = place + length; place < end;) {
      const size_t line = all.find('\n', place);
      list.push_back(all.substr(place, line - place));
      place = line + 1;
    }
  }
  for (size_t i = 0;; ++i) {
    std::map<std::string, std::vector<int>> ranks_of;  // what they hold at this place
    for (size_t rank = 0; rank < lists.size(); ++rank)
      ranks_of[i < lists[rank].size() ? "'" + lists[rank][i] + "'" : "nothing"].push_back(static_cast<int>(rank));
    if (ranks_of.size() == 1 && ranks_of.count("nothing") == 0) continue;
    std::string message = what + " differ between ranks. The first difference is number " + std::to_string(i) + ":";
    for (const auto& [item, ranks] : ranks_of)
      message += (message.back() == ':' ? " " : "; ") + item + " on rank " + joined(ranks);
    throw PlanMismatch(message + ".");
  }
}

}  // namespace keras_hpc
