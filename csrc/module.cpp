// afflux._engine: the entry points for Python arrays. Each function makes views of the arrays, releases the GIL and
// calls the engine; the engine's exceptions become Python exceptions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <deque>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "afflux.h"
#include "afflux/afflux.hpp"
#include "apply.hpp"
#include "array_table.hpp"
#include "arrays.hpp"
#include "buffers.hpp"
#include "checksums.hpp"
#include "columns.hpp"
#include "cpu/quota.hpp"
#include "foreign.hpp"
#include "forks.hpp"
#include "ledger.hpp"
#include "pages.hpp"
#include "parts.hpp"
#include "ready.hpp"
#include "release.hpp"
#include "row_check.hpp"
#include "shared_memory.hpp"

#if defined(Py_GIL_DISABLED)
#error "afflux does not support free-threaded Python yet: use the build of Python with the GIL"
#endif

namespace py = pybind11;

namespace afflux::python {
namespace {

py::tuple ingest_(const py::object& update, const py::object& slot, int num_threads, const py::object& conversion,
                  const py::object& other) {
  const Call call;
  RowCheck* const beside = other.is_none() ? nullptr : other.cast<RowCheck*>();
  Statistics statistics{};
  const Array to({"ingest", "slot"}, slot, Access::write);
  const View<void> out = to.view();
  const Converted change("ingest", conversion);
  const Buffer* const buffer = Buffer::in(slot);
  const std::int64_t until_read = buffer == nullptr ? 0 : buffer->until_read();
  const auto sweep = [&](const auto& source) {
    const auto work = [&] { statistics = ingest(source, out, num_threads, change.get(), until_read); };
    const GilRelease release;
    beside == nullptr ? work() : beside->beside(work);
  };
  if (PyList_Check(update.ptr()) || PyTuple_Check(update.ptr()))
    sweep(Arrays<const void>("ingest", "update", update, Access::read, Shape::any, false, as_view).list());
  else
    sweep(Array({"ingest", "update"}, update, Access::read).view());
  return py::make_tuple(statistics.first_nonfinite, statistics.sum_of_squares, statistics.min, statistics.max);
}

// Each entry of `vectors` is a tuple: a flat vector, the list of its arrays, the tuple of their shapes, and bytes that
// are 1 for each array that may hold integers.
void unflatten_(const py::list& vectors, int num_threads, bool dry) {
  std::deque<Array> memory;
  std::vector<std::vector<Target>> targets;
  std::vector<Unflattened> entries;
  targets.reserve(vectors.size());
  for (const py::handle entry : vectors) {
    const auto [vector, arrays, shapes, integers] =
        entry.cast<std::tuple<py::object, py::list, py::tuple, py::bytes>>();
    const auto place = static_cast<std::ptrdiff_t>(entries.size());
    const std::string_view may_be_integers = integers;
    if (arrays.size() != shapes.size() || arrays.size() != may_be_integers.size())
      throw Error("[unflatten] arrays, shapes and integers have different lengths");
    const View<void> view = memory.emplace_back(Argument{"unflatten", "vectors", place}, vector, Access::read).view();
    std::vector<Target>& list = targets.emplace_back();
    list.reserve(arrays.size());
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const py::object array = arrays[i], shape = shapes[i];
      Argument title("unflatten", "arrays", place, shape);
      title.part = static_cast<std::int32_t>(i);
      list.push_back(memory.emplace_back(title, array, Access::assign, Shape::any).target(may_be_integers[i] != 0));
    }
    entries.push_back({view, {list.data(), static_cast<std::int64_t>(list.size())}});
  }
  const GilRelease release;
  unflatten({entries.data(), static_cast<std::int64_t>(entries.size())}, num_threads, dry);
}

void gram_(const py::object& vectors, const py::object& out, int num_threads) {
  const Call call;
  const Arrays<const void> from("gram", "vectors", vectors, Access::read, Shape::vector, false, as_view);
  const Array to({"gram", "out"}, out, Access::write);
  const View<double> view = to.doubles();
  const GilRelease release;
  gram(from.list(), view, num_threads);
}

void inner_(const py::object& vectors, const py::object& weights, const py::object& memory, double shift,
            double memory_weight, const py::object& out, int num_threads) {
  const Call call;
  const Arrays<const void> from("inner", "vectors", vectors, Access::read, Shape::vector, false, as_view);
  std::optional<Array> given_weights;
  std::optional<Vector> given_memory;
  Inner terms{from.list(), {}, {}, shift, memory_weight};
  if (!weights.is_none()) {
    given_weights.emplace(Argument{"inner", "weights"}, weights, Access::read);
    const View<double> view = given_weights->doubles();
    static const double kNone = 0.0;  // without data there would be no sum
    terms.weights = {view.size > 0 ? view.data : &kNone, view.size};
  }
  if (!memory.is_none()) {
    given_memory.emplace(Argument{"inner", "memory"}, memory, Access::read);
    terms.memory = given_memory->view();
  }
  const Array to({"inner", "out"}, out, Access::write);
  const View<double> view = to.doubles();
  const GilRelease release;
  inner(terms, view, num_threads);
}

void encode_(const std::string& codec, const py::object& vector, const py::object& row, std::uint64_t key, double low,
             double high, int num_threads) {
  const Call call;
  const Codec kind = codec_named(codec);
  const Array from({"encode", "vector"}, vector, Access::read), to({"encode", "row"}, row, Access::write);
  const View<void> source = from.view();
  const View<unsigned char> target = to.row(kind);
  const GilRelease release;
  encode(kind, source, target, num_threads, {key, low, high});
}

void decode_(const std::string& codec, const py::object& row, const py::object& vector, int num_threads) {
  const Call call;
  const Codec kind = codec_named(codec);
  const Array from({"decode", "row"}, row, Access::read), to({"decode", "vector"}, vector, Access::write);
  const View<const unsigned char> source = read_only(from.row(kind));
  const View<void> target = to.view();
  const GilRelease release;
  decode(kind, source, target, num_threads);
}

py::bytes crc32c_(const py::object& data, std::int64_t block, std::int64_t head, int num_threads, bool table) {
  if (PyObject_CheckBuffer(data.ptr()) == 0)
    throw Error(std::string("[crc32c] data is a ") + Py_TYPE(data.ptr())->tp_name + ", expected a buffer");
  const py::buffer_info info = read_foreign([] { return std::string("[crc32c] data"); },
                                            [&] { return py::reinterpret_borrow<py::buffer>(data).request(); });
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) throw Error("[crc32c] data is not C-contiguous");
  std::vector<std::uint32_t> out;
  {
    const View<const unsigned char> view{static_cast<const unsigned char*>(info.ptr), info.size * info.itemsize, {}};
    const GilRelease release;
    out = crc32c(view, block, head, num_threads, table);
  }
  return as_bytes(out);
}

// Return the tables of the engine by name.
py::dict step_kinds() {
  py::dict kinds;
  for (const StepInfo& kind : kStepKinds) kinds[kind.name] = kind.states;
  return kinds;
}

py::dict codecs_() {
  py::dict all;
  for (const Codec codec : codecs()) {
    const CodingInfo& coding = info(codec.coding);
    all[py::str(name(codec))] =
        py::make_tuple(codec.bits, coding.row_type, coding.has_head, coding.needs_range, coding.run);
  }
  return all;
}

py::list backends_() {
  py::list list;
  for (const Backend& b : backends())
    list.append(py::make_tuple(b.name, b.device, b.compiled, b.runs, b.chosen, b.why_not));
  return list;
}

}  // namespace

// Rejects subinterpreters before the code of pybind11 runs, which would wait there for a lock that this thread holds.
extern "C" PyObject* PyInit_main_interpreter_engine();
extern "C" PYBIND11_EXPORT PyObject* PyInit__engine() {
  if (afflux_abi() != AFFLUX_ABI || std::strcmp(afflux_version(), AFFLUX_VERSION) != 0)
    return PyErr_Format(PyExc_ImportError,
                        "afflux %s has loaded a libafflux.so of version %s: another one than that beside its extension "
                        "(is there one in LD_LIBRARY_PATH, or an afflux-cuda13 of that version?)",
                        AFFLUX_VERSION, afflux_version());
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit_main_interpreter_engine();
  PyErr_SetString(PyExc_ImportError,
                  "afflux cannot be imported in a subinterpreter: its engine serves the main interpreter only, of one "
                  "process; use threads, or processes (multiprocessing)");
  return nullptr;
}

PYBIND11_MODULE(main_interpreter_engine, module) {
  module.doc() = "The afflux engine. Use it through afflux.ops.";
  py::register_local_exception<Error>(module, "AffluxError", PyExc_ValueError);
  py::register_local_exception<Unavailable>(module, "UnavailableError", PyExc_RuntimeError);
  module.attr("__version__") = AFFLUX_VERSION;
  module.attr("ORDER_VERSION") = kOrderVersion;
  module.attr("LANES") = kLanes;
  module.attr("BLOCK") = kBlock;
  module.attr("SUPERBLOCK") = kSuperblock;
  module.attr("MOST_RULE_VECTORS") = kMostRuleVectors;
  module.attr("STEP_KINDS") = step_kinds();
  module.attr("CODECS") = codecs_();
  module.def("ingest", ingest_, py::arg("update"), py::arg("slot"), py::arg("num_threads"),
             py::arg("conversion") = py::none(), py::arg("beside") = py::none());
  module.def("shared_memory", shared_memory, py::arg("lists"));
  module.def("unready", unready, py::arg("arrays"), py::arg("shapes"));
  module.def("unflatten", unflatten_, py::arg("vectors"), py::arg("num_threads"), py::arg("dry"));
  module.def("gram", gram_, py::arg("vectors"), py::arg("out"), py::arg("num_threads"));
  module.def("inner", inner_, py::arg("vectors"), py::arg("weights"), py::arg("memory"), py::arg("shift"),
             py::arg("memory_weight"), py::arg("out"), py::arg("num_threads"));
  bind_parts(module);
  bind_apply(module);
  module.def(
      "row_bytes", [](const std::string& codec, std::int64_t size) { return row_bytes(codec_named(codec), size); },
      py::arg("codec"), py::arg("size"));
  module.def("encode", encode_, py::arg("codec"), py::arg("vector"), py::arg("row"), py::arg("key"), py::arg("low"),
             py::arg("high"), py::arg("num_threads"));
  module.def("decode", decode_, py::arg("codec"), py::arg("row"), py::arg("vector"), py::arg("num_threads"));
  module.def("crc32c", crc32c_, py::arg("data"), py::arg("block"), py::arg("head"), py::arg("num_threads"),
             py::arg("table") = false);
  bind_pages(module);
  bind_row_check(module);
  module.def(
      "strict_float_mode",
      [](const py::object& function, const py::object& argument) {
        py::object output;
        strict_float_mode([&] { output = function(argument); });
        return output;
      },
      py::arg("function"), py::arg("argument"));
  module.def("exp", &afflux::exp, py::arg("x"));
  module.def("log", &afflux::log, py::arg("x"));
  module.def("pow", &afflux::pow, py::arg("x"), py::arg("y"));
  module.def("backends", backends_);
  module.def("choose_isa", choose_isa, py::arg("name"));
  module.def("policy", [] { return text(policy()); });
  module.def("cpu_quota", cpu_quota, py::arg("root") = "");
  module.def(
      "choose_policy", [](const std::string& text) { choose_policy(policy_of(text, "[choose_policy] text")); },
      py::arg("text"));
  module.def("processor_family", processor_family);
  bind_array_table(module);
  bind_buffers(module);
  bind_columns(module);
  bind_ledger(module);
  bind_forks(module);
}

}  // namespace afflux::python
