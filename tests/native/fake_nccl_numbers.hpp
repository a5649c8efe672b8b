// Numbers of NCCL's types, for the fake libnccl.so.2: read as doubles, and rounded when they are written.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace fake_nccl {

[[noreturn]] inline void die(const std::string& why) {
  std::fprintf(stderr, "fake NCCL: %s\n", why.c_str());
  std::abort();
}

inline size_t size_of(int dtype) {
  switch (dtype) {
    case 6:
    case 9:
      return 2;
    case 2:
    case 7:
      return 4;
    case 4:
    case 8:
      return 8;
    default:
      die("an unknown type");
  }
}

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

inline double number(int dtype, const std::byte* from) {
  switch (dtype) {
    case 6:
      return static_cast<double>(load<_Float16>(from));
    case 7:
      return load<float>(from);
    case 8:
      return load<double>(from);
    default: {
      const uint32_t bits = static_cast<uint32_t>(load<uint16_t>(from)) << 16;
      return load<float>(reinterpret_cast<const std::byte*>(&bits));
    }
  }
}

inline void put(int dtype, std::byte* to, double value) {
  switch (dtype) {
    case 6:
      return store(to, static_cast<_Float16>(value));
    case 7:
      return store(to, static_cast<float>(value));
    case 8:
      return store(to, value);
    default: {
      uint32_t bits =
          load<uint32_t>(reinterpret_cast<std::byte*>(std::vector<float>{static_cast<float>(value)}.data()));
      if ((bits & 0x7fffffff) > 0x7f800000)
        bits |= 0x400000;  // NaN stays NaN
      else
        bits += 0x7fff + (bits >> 16 & 1);
      return store(to, static_cast<uint16_t>(bits >> 16));
    }
  }
}

}  // namespace fake_nccl
