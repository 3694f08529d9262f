#include "parts.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>

#include "arrays.hpp"
#include "exchange.hpp"
#include "foreign.hpp"
#include "formats.hpp"
#include "numpy_array.hpp"
#include "values.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

py::tuple tuple_of_arrays(const py::object& arrays) {
  if (!PyList_Check(arrays.ptr()) && !PyTuple_Check(arrays.ptr()))
    throw Error("[Parts] arrays is a " + std::string(Py_TYPE(arrays.ptr())->tp_name) +
                ", expected a list or tuple of arrays");
  return read_foreign([] { return std::string("[Parts] arrays"); }, [&] { return py::tuple(arrays); });
}

Borders vector_of_borders(const py::object& borders) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(borders.ptr(), &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    throw Error("[Parts] borders is a " + std::string(Py_TYPE(borders.ptr())->tp_name) +
                ", expected a contiguous vector of int64");
  }
  const std::string format = buffer.format == nullptr ? "" : buffer.format;
  const bool fits = buffer.ndim == 1 && buffer.itemsize == 8 && (format == "l" || format == "q");
  const auto* const elements = static_cast<const std::int64_t*>(buffer.buf);
  auto copy = std::make_shared<std::vector<std::int64_t>>(elements, elements + (fits ? buffer.shape[0] : 0));
  PyBuffer_Release(&buffer);
  if (!fits) throw Error("[Parts] borders is no vector of int64");
  return copy;
}

std::optional<Type> type_of_dtype(const py::object& dtype) {
  if (dtype.is_none()) return {};
  const auto title = [] { return std::string("[Parts] dtype"); };
  const auto text = read_foreign(title, [&] { return std::string(py::str(dtype)); });
  for (const Type type : {Type::float32, Type::float64, Type::bfloat16})
    if (text == afflux::name(type)) return type;
  throw Error("[Parts] dtype is none of float32, float64 and bfloat16");
}

}  // namespace

Kind kind_named(const char* op, const std::string& name) {
  static const std::pair<const char*, Kind> kKinds[] = {
      {"update", Kind::update}, {"gradient", Kind::gradient}, {"model", Kind::model}};
  for (const auto& [kind_name, kind] : kKinds)
    if (name == kind_name) return kind;
  throw Error("[" + std::string(op) + "] conversion names '" + name + "', expected update, gradient or model");
}

PartsObject::PartsObject(const py::object& arrays, const py::object& borders, const py::object& conversion,
                         const py::object& dtype)
    : arrays(tuple_of_arrays(arrays)),
      borders(vector_of_borders(borders)),
      conversion(conversion),
      dtype(type_of_dtype(dtype)) {}

PartsObject::PartsObject(const PartsObject& like, const py::object& arrays, const py::object& conversion,
                         py::handle shapes, std::optional<Type> dtype)
    : arrays(tuple_of_arrays(arrays)),
      borders(like.borders),
      conversion(conversion),
      dtype(dtype),
      lent(std::make_shared<const PartArrays>(Argument{"Parts", "arrays"}, *this, Access::lend, shapes)) {}

Converted::Converted(const char* op, const py::object& conversion) {
  if (conversion.is_none()) return;
  using Facts = std::tuple<std::string, std::string, py::object, double>;
  py::detail::make_caster<Facts> caster;
  const auto title = [op] { return "[" + std::string(op) + "] conversion"; };
  if (!read_foreign(title, [&] { return caster.load(conversion, true); }))
    throw Error(title() + " is no afflux.ops.Conversion");
  const auto [from, to, base, scale] = py::detail::cast_op<Facts>(std::move(caster));
  conversion_ = Conversion{kind_named(op, from), kind_named(op, to), {}, scale};
  if (base.is_none()) return;
  base_ = std::make_unique<Vector>(Argument{op, "base"}, base, Access::read);
  conversion_->base = base_->view();
}
Converted::~Converted() = default;

PartArrays::PartArrays(Argument argument, const PartsObject& parts, Access access, py::handle shapes)
    : borders_(parts.borders), conversion_(argument.op, parts.conversion) {
  const std::size_t count = parts.arrays.size();
  arrays_.reserve(count);
  list_.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    argument.part = static_cast<std::int32_t>(i);
    argument.shape = shapes ? item(shapes, i) : py::handle();
    const Array& array = arrays_.emplace(argument, item(parts.arrays, i), access, Shape::any);
    const View<void> part = array.view();
    if (i == 0) view_ = {nullptr, 0, part.device, part.type};
    if (part.device != view_.device)
      throw Error(array.title() + " is on another device than " + arrays_.front().title());
    if (!parts.dtype && part.type != view_.type)
      throw Error(array.title() + " is " + name(part.type) + ", " + arrays_.front().title() + " is " +
                  name(view_.type) + ": give the dtype as which the parts are read");
    list_.push_back({part.data, part.size, part.type});
  }
  if (parts.dtype) view_.type = *parts.dtype;
  parts_ = {{borders_->data(), static_cast<std::int64_t>(borders_->size())},
            {list_.data(), static_cast<std::int64_t>(list_.size())},
            conversion_.get()};
  view_.parts = &parts_;
  if (!borders_->empty()) view_.size = borders_->back();
}

bool PartArrays::is_of(const py::tuple& arrays) const {
  for (std::size_t i = 0; i < list_.size(); ++i) {
    dlpack::Tensor tensor{};
    const void* data = nullptr;
    std::int64_t size = -1;
    if (const auto array = numpy_array(item(arrays, i), false)) {
      data = array->data;
      size = elements(array->dimensions, array->shape);
    } else if (described(item(arrays, i), &tensor)) {
      data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
      size = elements(tensor.ndim, tensor.shape);
    }
    if (data != list_[i].data || size != list_[i].size) return false;
  }
  return true;
}

std::shared_ptr<const PartArrays> PartArrays::of(Argument argument, const PartsObject& parts, Access access) {
  if (parts.lent && !writes(access) && parts.lent->is_of(parts.arrays)) return parts.lent;
  return std::make_shared<const PartArrays>(argument, parts, access);
}

void bind_parts(py::module_& module) {
  const auto parts =
      py::class_<PartsObject>(module, "Parts", py::module_local(),
                              "A vector in parts, one for each array of a model.\n\n"
                              "Args:\n"
                              "    arrays: the parts, a list or tuple of C-contiguous arrays of any shapes.\n"
                              "    borders: (P + 1,) int64: the index at which each of the P parts begins, and the "
                              "size.\n"
                              "    conversion: of updates, and of the vectors of gram and inner: converts the parts as "
                              "they are read.\n"
                              "    dtype: the type as which the parts are read; None: the one that all parts have.")
          .def(py::init<const py::object&, const py::object&, const py::object&, const py::object&>(),
               py::arg("arrays"), py::arg("borders"), py::arg("conversion") = py::none(), py::arg("dtype") = py::none())
          .def_property_readonly("arrays", [](const PartsObject& self) { return self.arrays; })
          .def_property_readonly("borders", [](const PartsObject& self) { return *self.borders; })
          .def_property_readonly("conversion", [](const PartsObject& self) { return self.conversion; })
          .def_property_readonly("dtype", [](const PartsObject& self) {
            return self.dtype ? py::object(py::str(name(*self.dtype))) : py::object(py::none());
          });
  PartsObject::type = reinterpret_cast<PyTypeObject*>(parts.ptr());
}

}  // namespace afflux::python
