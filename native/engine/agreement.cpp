// SPDX-License-Identifier: Apache-2.0
// Whether all ranks of a team want the same, and if not, where they first differ.
#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

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
  if (topology().size == 1) return;
  std::string text = what;
  for (const std::string& item : items) text += '\n' + item;
  meet(text, what.empty() && !items.empty() ? items[0] : what);
}

void Team::meet(const std::string& text, const std::string& label) {
  throw_if_failed();
  ++activity_.collectives;
  try {
    allreduce_->meet(std::hash<std::string>{}(text), label);
  } catch (const PlanMismatch& e) {  // on all ranks
    explain(text, e);
  } catch (const std::exception&) {
    fail_and_throw();
  }
}

namespace {

// For each different text, which ranks have it: "'a' on rank 0; 'b' on rank 1, 2".
std::string who_has_what(const std::map<std::string, std::vector<int>>& ranks_of) {
  std::vector<std::pair<std::vector<int>, std::string>> by_rank;
  for (const auto& [item, ranks] : ranks_of) by_rank.emplace_back(ranks, item);
  std::sort(by_rank.begin(), by_rank.end());
  std::string text;
  for (const auto& [ranks, item] : by_rank) text += (text.empty() ? "" : "; ") + item + " on rank " + joined(ranks);
  return text;
}

}  // namespace

void Team::explain(const std::string& text, const PlanMismatch& disagreement) {
  const std::vector<int64_t> lengths = allgather_count(static_cast<int64_t>(text.size()));
  const std::vector<size_t> nbytes(lengths.begin(), lengths.end());
  std::string all(std::accumulate(nbytes.begin(), nbytes.end(), size_t{0}), '\0');
  allgather(text.data(), all.data(), nbytes);
  // Of each rank what it does, empty where its only item says it, and the items.
  std::vector<std::vector<std::string>> lists;
  size_t place = 0;
  for (const size_t length : nbytes) {
    std::vector<std::string>& list = lists.emplace_back();
    const size_t end = place + length;
    while (place <= end) {
      const size_t line = std::min(all.find('\n', place), end);
      list.push_back(all.substr(place, line - place));
      place = line + 1;
    }
    place = end;  // no line ends behind the last one
  }
  // Where nothing that can be put into words differs.
  if (std::all_of(lists.begin(), lists.end(), [&](const auto& list) { return list == lists[0]; })) throw disagreement;

  std::map<std::string, std::vector<int>> ranks_of;
  std::set<std::string> calls;  // whose names end before a colon
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    const auto& list = lists[rank];
    const std::string& what = list[0].empty() && list.size() > 1 ? list[1] : list[0];
    ranks_of["'" + what + "'"].push_back(static_cast<int>(rank));
    calls.insert(what.substr(0, what.find(':')));
  }
  if (ranks_of.size() > 1 || lists[0][0].empty())
    throw PlanMismatch("Ranks disagree on what to communicate: " + who_has_what(ranks_of) + "." +
                       (calls.size() == 1 ? ""
                                          : " Every rank must make the same calls, in the same order; what a rank does "
                                            "by itself goes inside keras_hpc.local()."));
  for (size_t i = 1;; ++i) {
    ranks_of.clear();
    for (size_t rank = 0; rank < lists.size(); ++rank)
      ranks_of[i < lists[rank].size() ? "'" + lists[rank][i] + "'" : "nothing"].push_back(static_cast<int>(rank));
    if (ranks_of.size() > 1)
      throw PlanMismatch(lists[0][0] + " differ between ranks. The first difference is number " +
                         std::to_string(i - 1) + ": " + who_has_what(ranks_of) + ".");
  }
}

}  // namespace keras_hpc
