// SPDX-License-Identifier: Apache-2.0
#include "bindings/exchange.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "keras_hpc/engine.h"

namespace keras_hpc {
namespace {

struct PyExchange {
  const PyTeam* owner;  // kept alive by Python
  int number, id;
};

using Rows = std::tuple<int64_t, int64_t>;
using Send = std::tuple<int, int64_t, int64_t>;
using Receive = std::tuple<int, int64_t>;

PyExchange make(const PyTeam& owner, const std::string& name, const std::string& terms, int64_t extent, const Rows& own,
                const Rows& pads, double fill, const std::vector<Send>& sends, const std::vector<Receive>& receives,
                size_t lower, int64_t cells, const Rows& sides) {
  ExchangeSpec spec;
  spec.name = name;
  spec.extent = extent;
  spec.own = {std::get<0>(own), std::get<1>(own)};
  spec.before = std::get<0>(pads);
  spec.after = std::get<1>(pads);
  spec.fill = fill;
  for (const auto& [rank, begin, end] : sends) spec.sends.push_back({rank, {begin, end}});
  for (const auto& [rank, rows] : receives) spec.receives.push_back({rank, rows});
  spec.lower = lower;
  spec.cells = cells;
  spec.left = std::get<0>(sides);
  spec.right = std::get<1>(sides);
  const auto team = owner.get();
  const int number = WithoutGil()([&] { return team->make_exchange(spec, terms); });
  return {&owner, number, registry::add_exchange(team, number)};
}

const ExchangeSpec& spec_of(const PyExchange& exchange) {
  return exchange.owner->get()->exchange(exchange.number);
}

size_t nbytes(const PyExchange& exchange, const ExchangeShape& shape, bool result) {
  const ExchangeSpec& spec = spec_of(exchange);
  if (shape.outer < 0 || shape.inner < 0 || shape.inner % spec.cells != 0)
    throw nb::value_error("exchange: expected numbers of elements >= 0, a whole number for each cell of a row.");
  const RowLayout layout = result ? layout_wanted(spec, shape) : layout_given(spec, shape);
  return static_cast<size_t>(shape.outer) * layout.nbytes();
}

void start(const PyExchange& exchange, const ConstBytes& data, int64_t outer, int64_t inner, const std::string& dtype,
           bool adjoint) {
  const ExchangeShape shape{outer, inner, parse_dtype(dtype), adjoint};
  if (data.size() != nbytes(exchange, shape, false))
    throw nb::value_error("exchange: the tensor has other bytes than outer x rows x inner.");
  const auto team = exchange.owner->get();
  WithoutGil()([&] { team->start_exchange(exchange.number, shape, data.data()); });
}

void run(const PyExchange& exchange, const ConstBytes& data, const Bytes& result, int64_t outer, int64_t inner,
         const std::string& dtype, bool adjoint) {
  if (result.size() != nbytes(exchange, {outer, inner, parse_dtype(dtype), adjoint}, true))
    throw nb::value_error("exchange: the result has other bytes than outer x rows x inner.");
  start(exchange, data, outer, inner, dtype, adjoint);
  const auto team = exchange.owner->get();
  WithoutGil()([&] { team->wait_exchange(exchange.number, adjoint, result.data()); });
}

}  // namespace

void bind_exchange(nb::module_& m) {
  m.def("make_exchange", &make, "team"_a, "name"_a, "terms"_a, "extent"_a, "own"_a, "pads"_a, "fill"_a, "sends"_a,
        "receives"_a, "lower"_a, "cells"_a = 1, "sides"_a = Rows(0, 0), nb::keep_alive<0, 1>(),
        "Collective: rows of an axis for other ranks, (rank, begin, end), and from them, (rank, rows). Each row, of so "
        "many cells of the next axis, is padded by `sides` of them.");
  nb::class_<PyExchange>(m, "Exchange")
      .def_ro("id", &PyExchange::id)
      .def_prop_ro("extent", [](const PyExchange& exchange) { return spec_of(exchange).extent; })
      .def_prop_ro("window", [](const PyExchange& exchange) { return spec_of(exchange).rows(); })
      .def_prop_ro("cells", [](const PyExchange& exchange) { return spec_of(exchange).left + spec_of(exchange).right; })
      .def("start", &start, "data"_a.noconvert(), "outer"_a, "inner"_a, "dtype"_a, "adjoint"_a = false,
           "Of memory that stays valid until the wait has ended.")
      .def(
          "wait",
          [](const PyExchange& exchange, const Bytes& result, bool adjoint) {
            const auto team = exchange.owner->get();
            WithoutGil()([&] { team->wait_exchange(exchange.number, adjoint, result.data()); });
          },
          "result"_a.noconvert(), "adjoint"_a = false)
      .def("run", &run, "data"_a.noconvert(), "result"_a.noconvert(), "outer"_a, "inner"_a, "dtype"_a,
           "adjoint"_a = false, "Start and wait.");
}

}  // namespace keras_hpc
