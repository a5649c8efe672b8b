// SPDX-License-Identifier: Apache-2.0
#include "engine/trace.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace keras_hpc::trace {
namespace {

std::mutex mutex;
std::vector<Event> events;

int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// As JSON has text: of names, UTF-8 stays as it is.
void append_escaped(std::string& text, const std::string& name) {
  for (const char c : name) {
    if (c == '"' || c == '\\') text += '\\';
    if (static_cast<unsigned char>(c) >= 0x20)
      text += c;
    else
      text += ' ';  // no name of a layer has one
  }
}

void append_seconds(std::string& text, int64_t nanoseconds) {
  const std::string fraction = std::to_string(nanoseconds % 1'000'000'000);
  text.append(std::to_string(nanoseconds / 1'000'000'000))
      .append(".")
      .append(9 - fraction.size(), '0')
      .append(fraction);
}

}  // namespace

std::atomic<bool> enabled{false};

void record(std::string name, const char* kind, int team, Clock::time_point begin) {
  const auto end = Clock::now();
  const std::lock_guard lock(mutex);
  events.push_back({std::move(name), kind, team, nanoseconds(begin), nanoseconds(end)});
}

std::string take() {
  std::vector<Event> taken;
  {
    const std::lock_guard lock(mutex);
    taken.swap(events);
  }
  std::string text;
  for (const Event& event : taken) {
    text += text.empty() ? "[[\"" : ",[\"";
    append_escaped(text, event.name);
    text.append("\",\"").append(event.kind).append("\",").append(std::to_string(event.team));
    append_seconds(text.append(","), event.begin);
    append_seconds(text.append(","), event.end);
    text += ']';
  }
  if (!text.empty()) text += ']';
  return text;
}

}  // namespace keras_hpc::trace
