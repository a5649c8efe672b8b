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
  const auto put = [&](auto typed) { std::memcpy(one, &typed, sizeof typed); };
  const auto narrow = static_cast<float>(value);
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
      to_16_bits(dtype, &narrow, one, 1);
      break;
    case DType::float32:
      put(narrow);
      break;
    case DType::float64:
      put(value);
      break;
    case DType::int32:
      put(static_cast<int32_t>(value));
      break;
    case DType::int64:
      put(static_cast<int64_t>(value));
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

RowLayout own_layout(const ExchangeSpec& spec, const ExchangeShape& shape) {
  return {spec.extent, shape.row_bytes(), shape.row_bytes(), 0};
}

RowLayout window_layout(const ExchangeSpec& spec, const ExchangeShape& shape) {
  const size_t row = shape.row_bytes(), cell = row / static_cast<size_t>(spec.cells);
  const auto cells = [cell](int64_t count) { return static_cast<size_t>(count) * cell; };
  return {spec.rows(), row, row + cells(spec.left + spec.right), cells(spec.left)};
}

void copy_rows(const RowLayout& given, const Rows& source, const std::byte* from, const RowLayout& wanted,
               const Rows& target, std::byte* to) {
  from += static_cast<size_t>(source.begin) * given.pitch + given.skip;
  to += static_cast<size_t>(target.begin) * wanted.pitch + wanted.skip;
  const bool together = given.pitch == given.row && wanted.pitch == wanted.row;
  const auto rows = static_cast<size_t>(source.size());
  const size_t piece = given.row * (together ? rows : 1);
  if (piece == 0) return;
  for (size_t i = 0; i < (together ? 1 : rows); ++i) std::memcpy(to + i * wanted.pitch, from + i * given.pitch, piece);
}

}  // namespace

RowLayout layout_given(const ExchangeSpec& spec, const ExchangeShape& shape) {
  return shape.adjoint ? window_layout(spec, shape) : own_layout(spec, shape);
}

RowLayout layout_wanted(const ExchangeSpec& spec, const ExchangeShape& shape) {
  return shape.adjoint ? own_layout(spec, shape) : window_layout(spec, shape);
}

Pieces::Pieces(const RowLayout& layout, ExchangeSpec::Rows rows, std::byte* tensor)
    : data(tensor + static_cast<size_t>(rows.begin) * layout.pitch + layout.skip),
      piece(layout.row),
      pitch(layout.pitch),
      count(static_cast<size_t>(rows.size())),
      stride(layout.nbytes()) {
  if (pitch != piece) return;
  piece *= count;  // rows that lie side by side
  count = 1;
}

std::pair<std::byte*, size_t> Pieces::at(uint64_t byte) const {
  const size_t number = byte / piece, offset = byte % piece;
  return {data + number / count * stride + number % count * pitch + offset, piece - offset};
}

int64_t ExchangeSpec::rows() const {
  int64_t total = before + own.size() + after;
  for (const Receive& receive : receives) total += receive.rows;
  return total;
}

void ExchangeSpec::check(int rank, int size) const {
  const auto expect = [&](bool is, const char* expected) {
    if (!is) throw Error("Exchange '" + name + "': expected " + expected + ".");
  };
  const auto is_other = [&](int other) { return other >= 0 && other < size && other != rank; };
  const auto is_inside = [&](const Rows& part) {
    return 0 <= part.begin && part.begin <= part.end && part.end <= extent;
  };
  expect(extent >= 0 && before >= 0 && after >= 0 && left >= 0 && right >= 0, "numbers of rows >= 0");
  expect(cells > 0, "rows of one cell or more");
  expect(is_inside(own), "own rows that this rank has");
  expect(lower <= receives.size(), "at most as many receives from lower ranks as receives");
  int last = -1;
  for (const Send& send : sends) {
    expect(is_other(send.rank) && send.rank > last, "sends to other ranks of the team, in ascending order");
    expect(is_inside(send.rows) && send.rows.size() > 0, "to send rows that this rank has");
    last = send.rank;
  }
  last = -1;
  for (const Receive& receive : receives) {
    expect(is_other(receive.rank) && receive.rank > last, "receives from other ranks of the team, in ascending order");
    expect(receive.rows > 0, "to receive one row or more");
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
  const RowLayout given = layout_given(spec, shape), wanted = layout_wanted(spec, shape);
  const Rows in_window = places(spec).back();
  const Rows& source = shape.adjoint ? in_window : spec.own;
  const Rows& target = shape.adjoint ? spec.own : in_window;
  const double value = shape.adjoint ? 0 : spec.fill;
  // Of the result, rows that nobody sends: padding, or what of this rank's rows is not in its window.
  const int64_t first = shape.adjoint ? spec.own.begin : spec.before;
  const int64_t last = shape.adjoint ? spec.own.end : wanted.rows - spec.after;
  const auto at = [](const RowLayout& layout, int64_t row) { return static_cast<size_t>(row) * layout.pitch; };
  for (int64_t i = 0; i < shape.outer; ++i) {
    const std::byte* x = from + static_cast<size_t>(i) * given.nbytes();
    std::byte* y = to + static_cast<size_t>(i) * wanted.nbytes();
    fill(shape.dtype, value, y, at(wanted, first));
    fill(shape.dtype, value, y + at(wanted, last), at(wanted, wanted.rows - last));
    if (wanted.pitch != wanted.row) {
      const size_t end = wanted.pitch - wanted.skip - wanted.row;
      for (int64_t row = first; row < last; ++row) {
        fill(shape.dtype, value, y + at(wanted, row), wanted.skip);
        fill(shape.dtype, value, y + at(wanted, row + 1) - end, end);
      }
    }
    copy_rows(given, source, x, wanted, target, y);
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
