// Which places of the engine ask a fake driver for order, each of which can be left out.
//
// A place is known by the addresses of the calls that lead to it, up to a function of the engine that has a name.
#pragma once
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fake {

inline std::mutex of_sites;
inline std::atomic<bool> watched{false};
inline std::set<std::string> sites;
inline std::string ignored;
inline int times_ignored = 0;

inline std::string name_of(const char* symbol) {
  int status = 0;
  char* plain = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  std::string name = status == 0 ? plain : symbol;
  std::free(plain);
  return name.substr(0, name.find('('));
}

// "cuEventRecord in keras_hpc::DevicePlan::finish 0x1234": from where the driver was called; "" from elsewhere.
inline std::string site_of(const char* function, void** calls, int count) {
  std::string path;
  for (int i = 0; i < count; ++i) {
    Dl_info info = {};
    const char* call = static_cast<char*>(calls[i]) - 1;  // the address behind it may be another function's
    if (dladdr(call, &info) == 0 || std::strstr(info.dli_fname, "/libkeras_hpc.so") == nullptr) {
      if (path.empty()) continue;  // the driver itself
      break;
    }
    const std::string name = info.dli_sname == nullptr ? "" : name_of(info.dli_sname);
    if (name.rfind("keras_hpc::device::SumKernel", 0) == 0) return "";  // it is tried before there is any step
    if (name.rfind("keras_hpc::device::", 0) == 0) continue;            // what the engine calls the driver by
    char offset[32];
    std::snprintf(offset, sizeof offset, " 0x%zx", static_cast<size_t>(call - static_cast<char*>(info.dli_fbase)));
    path += offset;
    if (!name.empty()) return function + (" in " + name) + path;
  }
  return path.empty() ? "" : function + (" in the engine" + path);
}

// Whether what a driver's function is asked for is to be left out.
inline bool ignores(const char* function) {
  if (!watched) return false;
  static auto& known = *new std::map<std::vector<void*>, std::string>;
  std::vector<void*> calls(24);
  calls.resize(static_cast<size_t>(backtrace(calls.data(), static_cast<int>(calls.size()))));
  const std::lock_guard lock(of_sites);
  const auto [place, is_new] = known.try_emplace(calls);
  if (is_new) place->second = site_of(function, calls.data(), static_cast<int>(calls.size()));
  if (place->second.empty()) return false;
  sites.insert(place->second);
  if (place->second != ignored) return false;
  ++times_ignored;
  return true;
}

inline void watch(bool yes) {
  const std::lock_guard lock(of_sites);
  watched = yes;
  sites.clear();
}
inline std::string seen_sites() {
  const std::lock_guard lock(of_sites);
  std::string all;
  for (const std::string& site : sites) all += site + "\n";
  return all;
}
inline int ignore(const char* site) {
  const std::lock_guard lock(of_sites);
  ignored = site;
  const int before = times_ignored;
  times_ignored = 0;
  return before;
}

}  // namespace fake
