// SPDX-License-Identifier: Apache-2.0
// An exchange: rows of a tensor that each rank of a team sends to others, and receives, so that it has a window of the
// axis that is split among them; and its adjoint, which takes gradients of the window back to the rows' owners.
//
// A tensor is (outer, rows, inner) elements, contiguous. Forward, of `extent` rows this rank has then
//   [before: padding] [from the first `lower` of receives] [own rows] [from the others] [after: padding]
// Backward, of the gradient g of these, the owner gets
//   g of its own rows + what each receiver sends back for the rows that it got, in the order of ranks;   0 elsewhere
// Where the next axis is padded, too, each row of the window has `left` and `right` cells more, of inner / cells
// elements. Rows and ranks are agreed on once; outer, inner and dtype come with each call, the same on all ranks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/dtype.hpp"

namespace keras_hpc {

struct ExchangeSpec {
  struct Rows {
    int64_t begin = 0, end = 0;
    int64_t size() const { return end - begin; }
  };
  struct Send {
    int rank;
    Rows rows;
  };
  struct Receive {
    int rank;
    int64_t rows;
  };

  std::string name;
  int64_t extent = 0;
  Rows own;
  int64_t before = 0, after = 0;
  int64_t cells = 1, left = 0, right = 0;
  std::vector<Send> sends;        // by rank
  std::vector<Receive> receives;  // by rank, which is the order of their rows
  size_t lower = 0;
  double fill = 0;  // of padding

  // Of the window.
  int64_t rows() const;
  // Throws Error if it makes no sense by itself: ranks or rows that there are not.
  void check(int rank, int size) const;
};

// What one call is about. `inner` leaves padding out.
struct ExchangeShape {
  int64_t outer = 0, inner = 0;
  DType dtype = DType::float32;
  bool adjoint = false;

  size_t row_bytes() const { return static_cast<size_t>(inner) * size_of(dtype); }
};

// How a tensor's rows lie: `row` bytes each, `pitch` bytes apart, `skip` bytes of padding before each.
struct RowLayout {
  int64_t rows;
  size_t row, pitch, skip;

  size_t nbytes() const { return static_cast<size_t>(rows) * pitch; }  // for each of `outer`
};
// Of the tensor that is given, and of the result.
RowLayout layout_given(const ExchangeSpec& spec, const ExchangeShape& shape);
RowLayout layout_wanted(const ExchangeSpec& spec, const ExchangeShape& shape);

// Some rows of a tensor, without padding, as one run of bytes in pieces.
struct Pieces {
  std::byte* data = nullptr;     // of the first one
  size_t piece = 0, pitch = 0;   // bytes of one, and from one to the next
  size_t count = 1, stride = 0;  // pieces for each of `outer`, and bytes from there to there

  Pieces() = default;
  Pieces(const RowLayout& layout, ExchangeSpec::Rows rows, std::byte* tensor);
  // Where a byte of the run is, and how many lie together from there.
  std::pair<std::byte*, size_t> at(uint64_t byte) const;
};

// Rows of a tensor that travel to or from another rank.
struct Shipment {
  int rank;
  ExchangeSpec::Rows rows;
};

// What of the tensor that is given leaves, and where in the result what comes belongs.
std::vector<Shipment> outgoing(const ExchangeSpec& spec, bool adjoint);
std::vector<Shipment> incoming(const ExchangeSpec& spec, bool adjoint);

// Puts into the result what this rank has itself: its own rows, and padding (forward) or zeros (adjoint).
void place_own(const ExchangeSpec& spec, const ExchangeShape& shape, const std::byte* from, std::byte* to);
// Adds a block (outer, rows, inner) to rows of the result.
void add_rows(const ExchangeSpec& spec, const ExchangeShape& shape, const Shipment& shipment, const std::byte* block,
              std::byte* to);

}  // namespace keras_hpc
