#include "exchange.hpp"

#include <cstring>
#include <string>

#include "attributes.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// Returns true for torch.nn.Parameter, the only subclass of a tensor that is known to keep __dlpack__ unchanged.
bool is_parameter(PyTypeObject* type) {
  static const PyTypeObject* parameter_type = nullptr;
  if (type == parameter_type) return true;
  if (parameter_type != nullptr || std::strcmp(type->tp_name, "Parameter") != 0) return false;
  static const Attribute module("__module__");
  const py::object name = module.of_any(reinterpret_cast<PyObject*>(type));
  if (!name || !py::isinstance<py::str>(name) || name.cast<std::string>() != "torch.nn.parameter") return false;
  Py_INCREF(type);  // the type is held, so that no other type gets its address
  parameter_type = type;
  return true;
}

const dlpack::Exchange* exchange_of(PyTypeObject* type) {
  static const Attribute attribute("__dlpack_c_exchange_api__");
  static struct {
    PyTypeObject* type;  // held, so that no other type gets its address
    const dlpack::Exchange* exchange;
  } last{};
  if (type == last.type) return last.exchange;
  const py::handle capsule = attribute.of_type(is_parameter(type) ? type->tp_base : type);
  constexpr const char* kName = "dlpack_exchange_api";
  if (!capsule || PyCapsule_IsValid(capsule.ptr(), kName) == 0) return nullptr;
  const auto* const exchange = static_cast<const dlpack::Exchange*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  if (exchange->major != 1 || exchange->tensor_from_object == nullptr) return nullptr;
  PyTypeObject* const before = last.type;
  Py_INCREF(type);
  last = {type, exchange};
  Py_XDECREF(before);
  return exchange;
}

}  // namespace

bool described(py::handle object, dlpack::Tensor* out) {
  const dlpack::Exchange* const exchange = exchange_of(Py_TYPE(object.ptr()));
  if (exchange == nullptr) return false;
  if (exchange->tensor_from_object(object.ptr(), out) == 0) return out->device.type == dlpack::kCpu;
  PyErr_Clear();  // __dlpack__ raises the error
  return false;
}

bool requires_grad(py::handle object) {
  static const Attribute attribute("requires_grad");
  const py::object value = attribute.of_any(object);
  return value && PyObject_IsTrue(value.ptr()) == 1;
}

bool is_negative(py::handle object) {
  static const Attribute method("is_neg");
  const py::object value = method.call_any(object);
  return value && value.ptr() == Py_True;
}

}  // namespace afflux::python
