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
                size_t lower) {
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
  const auto team = owner.get();
  const int number = WithoutGil()([&] { return team->make_exchange(spec, terms); });
  return {&owner, number, registry::add_exchange(team, number)};
}

const ExchangeSpec& spec_of(const PyExchange& exchange) {
  return exchange.owner->get()->exchange(exchange.number);
}

size_t nbytes(const PyExchange& exchange, bool window, int64_t outer, int64_t inner, DType dtype) {
  const ExchangeSpec& spec = spec_of(exchange);
  return static_cast<size_t>(outer * inner * (window ? spec.rows() : spec.extent)) * size_of(dtype);
}

void start(const PyExchange& exchange, const ConstBytes& data, int64_t outer, int64_t inner, const std::string& dtype,
           bool adjoint) {
  const DType type = parse_dtype(dtype);
  if (outer < 0 || inner < 0 || data.size() != nbytes(exchange, adjoint, outer, inner, type))
    throw nb::value_error("exchange: the tensor has other bytes than outer x rows x inner.");
  const auto team = exchange.owner->get();
  WithoutGil()([&] { team->start_exchange(exchange.number, {outer, inner, type, adjoint}, data.data()); });
}

void run(const PyExchange& exchange, const ConstBytes& data, const Bytes& result, int64_t outer, int64_t inner,
         const std::string& dtype, bool adjoint) {
  if (result.size() != nbytes(exchange, !adjoint, outer, inner, parse_dtype(dtype)))
    throw nb::value_error("exchange: the result has other bytes than outer x rows x inner.");
  start(exchange, data, outer, inner, dtype, adjoint);
  const auto team = exchange.owner->get();
  WithoutGil()([&] { team->wait_exchange(exchange.number, adjoint, result.data()); });
}

}  // namespace

void bind_exchange(nb::module_& m) {
  m.def("make_exchange", &make, "team"_a, "name"_a, "terms"_a, "extent"_a, "own"_a, "pads"_a, "fill"_a, "sends"_a,
        "receives"_a, "lower"_a, nb::keep_alive<0, 1>(),
        "Collective: rows of an axis for other ranks, (rank, begin, end), and from them, (rank, rows).");
  nb::class_<PyExchange>(m, "Exchange")
      .def_ro("id", &PyExchange::id)
      .def_prop_ro("extent", [](const PyExchange& exchange) { return spec_of(exchange).extent; })
      .def_prop_ro("window", [](const PyExchange& exchange) { return spec_of(exchange).rows(); })
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
