// afflux._engine: the five entry points over Python arrays. Views in, GIL released, exceptions out; no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "afflux/afflux.hpp"
#include "arrays.hpp"
#include "buffers.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

View<void> as_view(const Array& array) { return array.view(); }
View<const unsigned char> read_only(View<unsigned char> row) { return {row.data, row.size, row.device}; }

py::tuple ingest_(const py::object& update, const py::object& slot, int num_threads) {
  Statistics result{};
  const Array to({"ingest", "slot"}, slot, Access::write);
  const View<void> out = to.view();
  if (PyList_Check(update.ptr()) || PyTuple_Check(update.ptr())) {
    const Arrays<const void> parts("ingest", "update", update, Access::read, Shape::any, false, as_view);
    const py::gil_scoped_release release;
    result = ingest(parts.list(), out, num_threads);
  } else {
    const Array from({"ingest", "update"}, update, Access::read);
    const View<void> view = from.view();
    const py::gil_scoped_release release;
    result = ingest(view, out, num_threads);
  }
  return py::make_tuple(result.first_nonfinite, result.sum_of_squares, result.min, result.max);
}

void gram_(const py::object& vectors, const py::object& out, int num_threads) {
  const Arrays<const void> from("gram", "vectors", vectors, Access::read, Shape::vector, false, as_view);
  const Array to({"gram", "out"}, out, Access::write);
  const View<double> view = to.doubles();
  const py::gil_scoped_release release;
  gram(from.list(), view, num_threads);
}

void apply_(const py::object& params, const py::object& out, const py::object& updates, const py::object& weights,
            double params_weight, double lr, bool cached, const py::object& sum, std::int64_t num_clients,
            const py::object& rows, const py::object& new_rows, int num_threads, std::optional<py::list> done) {
  const Array from({"apply", "params"}, params, Access::read), to({"apply", "out"}, out, Access::write),
      weight({"apply", "weights"}, weights, Access::read);
  const Arrays<const void> vectors("apply", "updates", updates, Access::read, Shape::vector, false, as_view);
  const View<double> w = weight.doubles();
  Pass pass;
  pass.params = from.view();
  pass.out = to.view();
  pass.combine = {vectors.list(), {w.data, w.size}, params_weight};
  pass.step.lr = lr;
  const Codec codec = exact_codec(vectors.list().size > 0 ? vectors.list().data[0].type : Type::float32);
  const auto row = [codec](const Array& array) { return array.row(codec); };
  const auto old_row = [codec](const Array& array) { return read_only(array.row(codec)); };
  const Arrays<const unsigned char> old("apply", "rows", rows, Access::read, Shape::vector, true, old_row);
  const Arrays<unsigned char> replaced("apply", "new_rows", new_rows, Access::write, Shape::vector, true, row);
  std::optional<Array> cache;
  if (cached) {
    cache.emplace(Argument{"apply", "sum"}, sum, Access::write);
    pass.calibrate = {
        Calibration::cached_difference, codec, cache->doubles(), num_clients, old.list(), replaced.list()};
  }
  {
    const py::gil_scoped_release release;
    apply(pass, num_threads);
  }
  // Before Python can run a signal handler: an exception of one cannot hide from the caller that the sweep was made.
  if (done) done->append(py::none());
}

Codec codec_named(const std::string& name) {
  if (name == "float32") return Codec::float32;
  if (name == "float64") return Codec::float64;
  throw Error("[codec] '" + name + "' is unknown; known: float32, float64");
}

void encode_(const std::string& codec, const py::object& vector, const py::object& row, int num_threads) {
  const Codec kind = codec_named(codec);
  const Array from({"encode", "vector"}, vector, Access::read), to({"encode", "row"}, row, Access::write);
  const View<void> source = from.view();
  const View<unsigned char> target = to.row(kind);
  const py::gil_scoped_release release;
  encode(kind, source, target, num_threads);
}

void decode_(const std::string& codec, const py::object& row, const py::object& vector, int num_threads) {
  const Codec kind = codec_named(codec);
  const Array from({"decode", "row"}, row, Access::read), to({"decode", "vector"}, vector, Access::write);
  const View<const unsigned char> source = read_only(from.row(kind));
  const View<void> target = to.view();
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
             py::arg("rows"), py::arg("new_rows"), py::arg("num_threads"), py::arg("done") = py::none());
  module.def(
      "row_bytes", [](const std::string& codec, std::int64_t size) { return row_bytes(codec_named(codec), size); },
      py::arg("codec"), py::arg("size"));
  module.def("encode", encode_, py::arg("codec"), py::arg("vector"), py::arg("row"), py::arg("num_threads"));
  module.def("decode", decode_, py::arg("codec"), py::arg("row"), py::arg("vector"), py::arg("num_threads"));
  module.def("backends", backends_);
  module.def("choose_isa", choose_isa, py::arg("name"));
  bind_buffers(module);
}

}  // namespace afflux::python
