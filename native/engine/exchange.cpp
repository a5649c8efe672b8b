// SPDX-License-Identifier: Apache-2.0
#include "engine/exchange.hpp"

#include <algorithm>
#include <cstring>

#include "algorithms/kernels.hpp"
#include "common/error.hpp"

namespace keras_hpc {
namespace {

using Rows = ExchangeSpec::Rows;

// Where the rows of each receive lie in the window; the last one is where this rank's own do.
std::vector<Rows> places(const ExchangeSpec& spec) {
  std::vector<Rows> found;
  Rows own;
  int64_t at = spec.before;
  for (size_t i = 0; i <= spec.receives.size(); ++i) {
    if (i == spec.lower) {
      own = {at, at + spec.own.size()};
      at = own.end;
    }
    if (i == spec.receives.size()) break;
    found.push_back({at, at + spec.receives[i].rows});
    at = found.back().end;
  }
  found.push_back(own);
  return found;
}

void fill(DType dtype, double value, std::byte* to, size_t nbytes) {
  if (nbytes == 0) return;
  if (value == 0) {
    std::memset(to, 0, nbytes);
    return;
  }
  std::byte one[8];
  const auto narrow = static_cast<float>(value);
  const auto count32 = static_cast<int32_t>(value);
  const auto count64 = static_cast<int64_t>(value);
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
      to_16_bits(dtype, &narrow, one, 1);
      break;
    case DType::float32:
      std::memcpy(one, &narrow, sizeof narrow);
      break;
    case DType::float64:
      std::memcpy(one, &value, sizeof value);
      break;
    case DType::int32:
      std::memcpy(one, &count32, sizeof count32);
      break;
    case DType::int64:
      std::memcpy(one, &count64, sizeof count64);
      break;
  }
  // The first value, then what is there already, twice as much each time.
  size_t done = std::min(size_of(dtype), nbytes);
  std::memcpy(to, one, done);
  while (done < nbytes) {
    const size_t n = std::min(done, nbytes - done);
    std::memcpy(to + done, to, n);
    done += n;
  }
}

}  // namespace

int64_t ExchangeSpec::rows() const {
  int64_t total = before + own.size() + after;
  for (const Receive& receive : receives) total += receive.rows;
  return total;
}

void ExchangeSpec::check(int rank, int size) const {
  const auto right = [&](bool is, const char* expected) {
    if (!is) throw Error("Exchange '" + name + "': expected " + expected + ".");
  };
  const auto is_other = [&](int other) { return other >= 0 && other < size && other != rank; };
  const auto is_inside = [&](const Rows& part) {
    return 0 <= part.begin && part.begin <= part.end && part.end <= extent;
  };
  right(extent >= 0 && before >= 0 && after >= 0, "numbers of rows >= 0");
  right(is_inside(own), "own rows that this rank has");
  right(lower <= receives.size(), "at most as many receives from lower ranks as receives");
  int last = -1;
  for (const Send& send : sends) {
    right(is_other(send.rank) && send.rank > last, "sends to other ranks of the team, in ascending order");
    right(is_inside(send.rows) && send.rows.size() > 0, "to send rows that this rank has");
    last = send.rank;
  }
  last = -1;
  for (const Receive& receive : receives) {
    right(is_other(receive.rank) && receive.rank > last, "receives from other ranks of the team, in ascending order");
    right(receive.rows > 0, "to receive one row or more");
    last = receive.rank;
  }
}

std::vector<Shipment> outgoing(const ExchangeSpec& spec, bool adjoint) {
  std::vector<Shipment> found;
  if (adjoint) {
    const std::vector<Rows> in_window = places(spec);
    for (size_t i = 0; i < spec.receives.size(); ++i) found.push_back({spec.receives[i].rank, in_window[i]});
  } else {
    for (const auto& send : spec.sends) found.push_back({send.rank, send.rows});
  }
  return found;
}

std::vector<Shipment> incoming(const ExchangeSpec& spec, bool adjoint) {
  return outgoing(spec, !adjoint);
}

void place_own(const ExchangeSpec& spec, const ExchangeShape& shape, const std::byte* from, std::byte* to) {
  const size_t row = shape.row_bytes();
  const auto bytes = [row](int64_t rows) { return static_cast<size_t>(rows) * row; };
  const Rows in_window = places(spec).back();
  const int64_t window = spec.rows();
  for (int64_t i = 0; i < shape.outer; ++i) {
    if (shape.adjoint) {
      const std::byte* g = from + bytes(i * window);
      std::byte* x = to + bytes(i * spec.extent);
      std::memset(x, 0, bytes(spec.own.begin));
      if (bytes(spec.own.size()) > 0)
        std::memcpy(x + bytes(spec.own.begin), g + bytes(in_window.begin), bytes(spec.own.size()));
      std::memset(x + bytes(spec.own.end), 0, bytes(spec.extent - spec.own.end));
    } else {
      const std::byte* x = from + bytes(i * spec.extent);
      std::byte* y = to + bytes(i * window);
      fill(shape.dtype, spec.fill, y, bytes(spec.before));
      if (bytes(spec.own.size()) > 0)
        std::memcpy(y + bytes(in_window.begin), x + bytes(spec.own.begin), bytes(spec.own.size()));
      fill(shape.dtype, spec.fill, y + bytes(window - spec.after), bytes(spec.after));
    }
  }
}

void add_rows(const ExchangeSpec& spec, const ExchangeShape& shape, const Shipment& shipment, const std::byte* block,
              std::byte* to) {
  const size_t row = shape.row_bytes();
  const auto rows = static_cast<size_t>(shipment.rows.size());
  const size_t count = rows * static_cast<size_t>(shape.inner);
  for (int64_t i = 0; i < shape.outer && count > 0; ++i) {
    std::byte* target = to + static_cast<size_t>(i * spec.extent + shipment.rows.begin) * row;
    const Source sources[2] = {{target, 1}, {block + static_cast<size_t>(i) * rows * row, 1}};
    void* out = target;
    reduce(shape.dtype, Op::sum, sources, 2, false, 1, &out, 1, count);
  }
}

}  // namespace keras_hpc
