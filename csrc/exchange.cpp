#include "exchange.hpp"

#include <cstring>
#include <string>

#include "attributes.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// A class of torch, which is known once a type of its name and module was seen. Create it once for the process.
class TorchClass {
 public:
  TorchClass(const char* name, const char* module) : name_(name), module_(module) {}
  bool is(PyTypeObject* type) {
    if (type == type_) return true;
    if (type_ != nullptr || std::strcmp(type->tp_name, name_) != 0) return false;
    static const Attribute attribute("__module__");
    const py::object module = attribute.of_any(reinterpret_cast<PyObject*>(type));
    if (!module || !py::isinstance<py::str>(module) || module.cast<std::string>() != module_) return false;
    Py_INCREF(type);  // the type is held, so that no other type gets its address
    type_ = type;
    return true;
  }

 private:
  const char *const name_, *const module_;
  const PyTypeObject* type_ = nullptr;
};

// torch.nn.Parameter is the only subclass of a tensor that is known to keep __dlpack__ unchanged.
bool is_parameter(PyTypeObject* type) {
  static TorchClass parameter("Parameter", "torch.nn.parameter");
  return parameter.is(type);
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

bool is_torch(PyTypeObject* type) {
  static TorchClass tensor("Tensor", "torch");
  return tensor.is(type) || is_parameter(type);
}

const dlpack::Exchange* describe(py::handle object, dlpack::Tensor* out) {
  const dlpack::Exchange* const exchange = exchange_of(Py_TYPE(object.ptr()));
  if (exchange == nullptr || exchange->tensor_from_object(object.ptr(), out) == 0) return exchange;
  PyErr_Clear();  // __dlpack__ raises the error
  return nullptr;
}

bool described(py::handle object, dlpack::Tensor* out) {
  return describe(object, out) != nullptr && out->device.type == dlpack::kCpu;
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
