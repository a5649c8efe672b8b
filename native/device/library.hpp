// SPDX-License-Identifier: Apache-2.0
// Libraries that are there or not, bound at run time.
#pragma once
#include <dlfcn.h>

#include <cstring>
#include <initializer_list>
#include <string>

#include "common/error.hpp"

namespace keras_hpc::device {

// One that the process has loaded already, else the one at `path`, else the system's: of several names the first.
// Throws Error where there is none, which begins with `what` it is.
inline void* open_library(const char* what, std::initializer_list<const char*> names, const std::string& path) {
  for (const char* name : names)
    if (void* loaded = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) return loaded;
  if (void* given = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL)) return given;
  for (const char* name : names)
    if (void* system = dlopen(name, RTLD_LAZY | RTLD_LOCAL)) return system;
  throw Error(std::string(what) + " cannot be loaded: " + dlerror());
}

// Throws Error where `what` the library is lacks the function, with the version that is `expected`.
template <class Function>
void bind_symbol(void* library, Function& function, const char* symbol, const char* what, const char* expected) {
  void* address = dlsym(library, symbol);
  if (address == nullptr)
    throw Error(std::string(what) + " is too old: it has no function " + symbol + ". Expected " + expected + ".");
  std::memcpy(&function, &address, sizeof address);
}

}  // namespace keras_hpc::device
