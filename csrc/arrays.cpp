#include "arrays.hpp"

#include "dlpack.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// Without a prefix that says the byte order of this machine (NumPy gives unaligned arrays one).
std::string native_format(const std::string& format) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  const char* const native = "@=<";
#else
  const char* const native = "@=>!";
#endif
  return format.find_first_of(native) == 0 ? format.substr(1) : format;
}

std::string numpy_like_name(const std::string& format) {
  if (format == "f") return "float32";
  if (format == "d") return "float64";
  if (format == "e") return "float16";
  if (format == "B") return "uint8";
  if (format == "i") return "int32";
  if (format == "l" || format == "q") return "int64";
  if (format == "?") return "bool";
  return "buffer format '" + format + "'";
}

std::string dlpack_name(dlpack::Type type) {
  const char* base = "type code ";
  switch (type.code) {
    case dlpack::kInt:
      base = "int";
      break;
    case dlpack::kUInt:
      base = "uint";
      break;
    case dlpack::kFloat:
      base = "float";
      break;
    case dlpack::kBfloat:
      base = "bfloat";
      break;
    case dlpack::kComplex:
      base = "complex";
      break;
    case dlpack::kBool:
      base = "bool";
      break;
    default:
      break;
  }
  return base + std::to_string(type.bits);
}

void release_buffer(Py_buffer* buffer) {
  PyBuffer_Release(buffer);
  delete buffer;
}

}  // namespace

Array::Array(const char* op, std::string name, py::handle object, Access access) : op_(op), name_(std::move(name)) {
  if (PyObject_CheckBuffer(object.ptr()))
    from_buffer(object, access);
  else if (py::hasattr(object, "__dlpack__"))
    from_dlpack(object, access);
  else
    fail("is a " + std::string(Py_TYPE(object.ptr())->tp_name) + ", expected an array (buffer protocol or DLPack)");
}

void Array::fail(const std::string& what) const { throw Error("[" + std::string(op_) + "] " + name_ + " " + what); }

void Array::wrong_type(const char* expected) const { fail("is " + type_name_ + ", expected " + expected); }

void Array::expect(char type) const {
  if (type_ != type) wrong_type(type == 'f' ? "float32" : type == 'd' ? "float64" : "uint8");
}

void Array::from_buffer(py::handle object, Access access) {
  auto* const buffer = new Py_buffer();
  if (PyObject_GetBuffer(object.ptr(), buffer, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    delete buffer;
    PyErr_Clear();
    fail("does not give its memory through the buffer protocol");
  }
  owner_ = std::shared_ptr<void>(buffer, [](void* p) { release_buffer(static_cast<Py_buffer*>(p)); });
  if (access == Access::write && buffer->readonly) fail("is read-only, but is written");
  const std::string format = native_format(buffer->format == nullptr ? "B" : buffer->format);
  type_name_ = numpy_like_name(format);
  if (format == "f" || format == "d" || format == "B") type_ = format[0];
  if (buffer->ndim != 1) fail("has " + std::to_string(buffer->ndim) + " dimensions, expected 1");
  item_size_ = buffer->itemsize;
  size_ = buffer->shape != nullptr ? buffer->shape[0] : buffer->len / buffer->itemsize;
  // ctypes arrays come without strides even when asked for them: C-contiguous.
  if (size_ > 1 && buffer->strides != nullptr && buffer->strides[0] != buffer->itemsize)
    fail("is strided (step of " + std::to_string(buffer->strides[0]) + " bytes), expected a contiguous vector");
  data_ = buffer->buf;
}

void Array::from_dlpack(py::handle object, Access access) {
  py::object capsule;
  try {
    const auto where = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
    if (where.first == dlpack::kCuda || where.first == dlpack::kCudaManaged)
      throw Unavailable("[" + std::string(op_) + "] " + name_ + " is on cuda:" + std::to_string(where.second) +
                        ", but this build has no CUDA kernels");
    if (where.first != dlpack::kCpu && where.first != dlpack::kCudaHost)
      fail("is on DLPack device type " + std::to_string(where.first) + ", expected the CPU");
    try {
      capsule = object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0));
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      capsule = object.attr("__dlpack__")();
    }
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // a KeyboardInterrupt is nobody's mistake
    fail("does not give its memory through DLPack: " + std::string(py::str(error.value())));
  } catch (const py::cast_error&) {
    fail("has a __dlpack_device__ that does not return two integers");
  }

  dlpack::Tensor tensor{};
  bool read_only = false;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* const managed =
        static_cast<dlpack::ManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    owner_ = std::shared_ptr<void>(managed, [](void* p) {
      auto* const m = static_cast<dlpack::ManagedVersioned*>(p);
      if (m->deleter != nullptr) m->deleter(m);
    });
    if (managed->major != 1) fail("comes as DLPack version " + std::to_string(managed->major) + ", expected 1");
    tensor = managed->tensor;
    read_only = (managed->flags & dlpack::kReadOnly) != 0;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    auto* const managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    owner_ = std::shared_ptr<void>(managed, [](void* p) {
      auto* const m = static_cast<dlpack::Managed*>(p);
      if (m->deleter != nullptr) m->deleter(m);
    });
    tensor = managed->tensor;
  } else {
    fail("gave something that is no DLPack capsule");
  }

  if (access == Access::write && read_only) fail("is read-only, but is written");
  type_name_ = dlpack_name(tensor.dtype);
  if (tensor.dtype.lanes != 1) type_name_ += "x" + std::to_string(tensor.dtype.lanes);
  if (type_name_ == "float32") type_ = 'f';
  if (type_name_ == "float64") type_ = 'd';
  if (type_name_ == "uint8") type_ = 'B';
  if (tensor.ndim != 1) fail("has " + std::to_string(tensor.ndim) + " dimensions, expected 1");
  item_size_ = tensor.dtype.bits / 8;
  size_ = tensor.shape[0];
  if (size_ > 1 && tensor.strides != nullptr && tensor.strides[0] != 1)
    fail("is strided (step of " + std::to_string(tensor.strides[0]) + " elements), expected a contiguous vector");
  if (tensor.data != nullptr) data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
}

}  // namespace afflux::python
