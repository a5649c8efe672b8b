// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "bindings/python.hpp"
#include "engine/registry.hpp"
#include "engine/team.hpp"

namespace keras_hpc {

// A team and its numbers for the frameworks' operations.
class PyTeam {
 public:
  PyTeam(std::unique_ptr<Transport> transport, int number, int threads, double timeout_seconds, double stall_seconds,
         const std::string& waiting)
      : team_(std::make_shared<Team>(
            std::move(transport), number,
            TeamOptions{threads, timeout_seconds, stall_seconds,
                        waiting == "auto" ? std::nullopt : std::optional(parse_patience(waiting))})),
        id_(registry::add(team_)) {}
  ~PyTeam() {
    const nb::gil_scoped_release released;  // other threads that use it need it to get out
    close();
  }

  // Holds it for as long as the caller works with it: another thread may close it.
  std::shared_ptr<Team> get() const {
    if (!is_of_this_process()) throw Error("This process was forked from a rank and is none itself: it has no team.");
    const std::lock_guard lock(closing_);
    if (!team_) throw Error("This team is closed: keras_hpc.finalize() was called.");
    return team_;
  }
  int id() const { return id_; }
  void close() {
    if (!is_of_this_process()) {  // it is the parent's, whose threads are not here
      new std::shared_ptr<Team>(std::move(team_));
      return;
    }
    std::shared_ptr<Team> team;
    {
      const std::lock_guard lock(closing_);
      team = team_;
    }
    if (!team) return;
    team->close();  // before anybody is told: what it was given it then uses no more
    {
      const std::lock_guard lock(closing_);
      team_ = nullptr;
    }
    registry::close(std::move(team));
  }
  // Calls `f` with the team unless it is closed.
  template <class F>
  void if_open(F&& f) const {
    if (!is_of_this_process()) return;
    std::shared_ptr<Team> team;
    {
      const std::lock_guard lock(closing_);
      team = team_;
    }
    if (team) f(*team);
  }

 private:
  bool is_of_this_process() const { return fork_depth() == fork_depth_; }

  const int fork_depth_ = fork_depth();
  mutable std::mutex closing_;
  std::shared_ptr<Team> team_;
  int id_;
};

void bind_team(nb::module_& m);

}  // namespace keras_hpc
