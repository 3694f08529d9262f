// afflux._engine: the five entry points over Python arrays. Views in, GIL released, exceptions out; no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "afflux/afflux.hpp"
#include "arrays.hpp"
#include "versions.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// A sequence of arrays, held together with the views that the engine reads.
template <class T>
class Arrays {
 public:
  Arrays(const char* op, const char* name, const py::sequence& objects, Access access, bool optional) {
    const std::size_t count = py::len(objects);
    for (std::size_t i = 0; i < count; ++i) {
      // Owned while its memory is acquired: a sequence may make its items on the fly.
      const py::object object = objects[i];
      if (optional && object.is_none()) {
        views_.push_back({});
        continue;
      }
      arrays_.emplace_back(op, std::string(name) + "[" + std::to_string(views_.size()) + "]", object, access);
      if constexpr (std::is_same_v<std::remove_const_t<T>, unsigned char>)
        views_.push_back(arrays_.back().template bytes<T>());
      else
        views_.push_back(arrays_.back().template view<T>());
      // An empty array is no missing one: the engine reads a null pointer as "absent".
      if (optional && views_.back().data == nullptr)
        views_.back().data = reinterpret_cast<T*>(alignof(std::max_align_t));
    }
  }
  List<View<T>> list() const { return {views_.data(), static_cast<std::int64_t>(views_.size())}; }

 private:
  std::vector<Array> arrays_;
  std::vector<View<T>> views_;
};

py::tuple ingest_(const py::object& update, const py::object& slot, int num_threads) {
  const Array from("ingest", "update", update, Access::read), to("ingest", "slot", slot, Access::write);
  const View<float> out = to.view<float>();
  Statistics result{};
  if (from.is_double()) {
    const auto view = from.view<const double>();
    const py::gil_scoped_release release;
    result = ingest(view, out, num_threads);
  } else {
    if (!from.is_float()) from.wrong_type("float32 or float64");
    const auto view = from.view<const float>();
    const py::gil_scoped_release release;
    result = ingest(view, out, num_threads);
  }
  return py::make_tuple(result.first_nonfinite, result.sum_of_squares, result.min, result.max);
}

void gram_(const py::sequence& vectors, const py::object& out, int num_threads) {
  const Arrays<const float> from("gram", "vectors", vectors, Access::read, false);
  const Array to("gram", "out", out, Access::write);
  const auto view = to.view<double>();
  const py::gil_scoped_release release;
  gram(from.list(), view, num_threads);
}

void apply_(const py::object& params, const py::object& out, const py::sequence& updates, const py::object& weights,
            double params_weight, double lr, bool cached, const py::object& sum, std::int64_t num_clients,
            const py::sequence& rows, const py::sequence& new_rows, int num_threads) {
  const Array from("apply", "params", params, Access::read), to("apply", "out", out, Access::write),
      weight("apply", "weights", weights, Access::read);
  const Arrays<const float> vectors("apply", "updates", updates, Access::read, false);
  const Arrays<const unsigned char> old("apply", "rows", rows, Access::read, true);
  const Arrays<unsigned char> replaced("apply", "new_rows", new_rows, Access::write, true);
  std::optional<Array> cache;
  const View<const double> w = weight.view<const double>();
  Pass pass;
  pass.params = from.view<const float>();
  pass.out = to.view<float>();
  pass.combine = {vectors.list(), {w.data, w.size}, params_weight};
  if (cached) {
    cache.emplace("apply", "sum", sum, Access::write);
    pass.calibrate = {Calibration::cached_difference,
                      Codec::float32,
                      cache->view<double>(),
                      num_clients,
                      old.list(),
                      replaced.list()};
  }
  pass.step.lr = lr;
  const py::gil_scoped_release release;
  apply(pass, num_threads);
}

Codec codec_named(const std::string& name) {
  if (name == "float32") return Codec::float32;
  throw Error("[codec] '" + name + "' is unknown; known: float32");
}

void encode_(const std::string& codec, const py::object& vector, const py::object& row, int num_threads) {
  const Array from("encode", "vector", vector, Access::read), to("encode", "row", row, Access::write);
  const auto source = from.view<const float>();
  const auto target = to.bytes<unsigned char>();
  const Codec kind = codec_named(codec);
  const py::gil_scoped_release release;
  encode(kind, source, target, num_threads);
}

void decode_(const std::string& codec, const py::object& row, const py::object& vector, int num_threads) {
  const Array from("decode", "row", row, Access::read), to("decode", "vector", vector, Access::write);
  const auto source = from.bytes<const unsigned char>();
  const auto target = to.view<float>();
  const Codec kind = codec_named(codec);
  const py::gil_scoped_release release;
  decode(kind, source, target, num_threads);
}

py::list backends_() {
  py::list list;
  for (const Backend& b : backends())
    list.append(py::make_tuple(b.name, b.device, b.compiled, b.runs, b.chosen, b.why_not));
  return list;
}

}  // namespace

PYBIND11_MODULE(_engine, module) {
  module.doc() = "The afflux engine. Use it through afflux.ops.";
  py::register_exception<Error>(module, "AffluxError", PyExc_ValueError);
  py::register_exception<Unavailable>(module, "UnavailableError", PyExc_RuntimeError);
  module.attr("__version__") = AFFLUX_VERSION;
  module.attr("ORDER_VERSION") = kOrderVersion;
  module.attr("LANES") = kLanes;
  module.attr("BLOCK") = kBlock;
  module.attr("SUPERBLOCK") = kSuperblock;
  module.def("ingest", ingest_, py::arg("update"), py::arg("slot"), py::arg("num_threads"));
  module.def("gram", gram_, py::arg("vectors"), py::arg("out"), py::arg("num_threads"));
  module.def("apply", apply_, py::arg("params"), py::arg("out"), py::arg("updates"), py::arg("weights"),
             py::arg("params_weight"), py::arg("lr"), py::arg("cached"), py::arg("sum"), py::arg("num_clients"),
             py::arg("rows"), py::arg("new_rows"), py::arg("num_threads"));
  module.def(
      "row_bytes", [](const std::string& codec, std::int64_t size) { return row_bytes(codec_named(codec), size); },
      py::arg("codec"), py::arg("size"));
  module.def("encode", encode_, py::arg("codec"), py::arg("vector"), py::arg("row"), py::arg("num_threads"));
  module.def("decode", decode_, py::arg("codec"), py::arg("row"), py::arg("vector"), py::arg("num_threads"));
  module.def("backends", backends_);
  module.def("choose_isa", choose_isa, py::arg("name"));
  bind_versions(module);
}

}  // namespace afflux::python
