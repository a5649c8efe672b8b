// SPDX-License-Identifier: Apache-2.0
// What every binding needs: memory of arrays, waiting without the GIL, names.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

#include "common/dtype.hpp"
#include "common/error.hpp"
#include "engine/failure.hpp"

namespace keras_hpc {

namespace nb = nanobind;
using namespace nb::literals;

// Memory of any dtype as bytes: NumPy has dtypes (bfloat16) that buffers cannot name, so the dtype comes beside it.
// .noconvert() on every argument of this type: otherwise an operation in place would work on a temporary copy.
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Lets other threads of Python run while this one waits. Ctrl-C ends a wait of the main thread, within about a second:
// the wait ends with Interrupted, and Python raises what its handler has raised.
class WithoutGil {
 public:
  WithoutGil() : before_(std::exchange(check_interrupt, is_main_thread ? check : nullptr)) {}
  ~WithoutGil() { check_interrupt = before_; }

  template <class F>
  auto operator()(F&& f) const -> decltype(f()) {
    try {
      const nb::gil_scoped_release released;
      return f();
    } catch (const Interrupted&) {
      if (PyErr_Occurred()) throw nb::python_error();
      throw;
    }
  }

 private:
  static void check() {
    const nb::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0)
      throw Interrupted("A signal handler of this rank, such as that of Ctrl-C, has ended its wait.");
  }

  // Python tells only that one of signals.
  static inline thread_local const bool is_main_thread = getpid() == static_cast<pid_t>(syscall(SYS_gettid));
  void (*const before_)();
};

inline std::optional<DType> parse_wire(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const DType wire = parse_dtype(name);
  if (wire != DType::float16 && wire != DType::bfloat16)
    throw nb::value_error("Values are sent as they are, or as float16 or bfloat16.");
  return wire;
}

}  // namespace keras_hpc
