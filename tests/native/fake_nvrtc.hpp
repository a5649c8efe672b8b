// What the fake libnvrtc.so compiles to: a shared library for the host, behind this.
#pragma once
#include <cstdint>

namespace fake_nvrtc {

constexpr uint64_t kMagic = 0x6e696275632d6f6e;
struct Header {
  uint64_t magic, nbytes;
};

}  // namespace fake_nvrtc
