#include "arrays.hpp"

#include <string>
#include <utility>

#include "api/check.hpp"
#include "attributes.hpp"
#include "buffers.hpp"
#include "dlpack.hpp"
#include "exchange.hpp"
#include "expected.hpp"
#include "foreign.hpp"
#include "formats.hpp"
#include "numpy_array.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

template <class Managed>
void delete_managed(void* pointer) {
  auto* const managed = static_cast<Managed*>(pointer);
  if (managed->deleter != nullptr) managed->deleter(managed);
}

// Takes the tensor out of a capsule with this name. Returns null for a capsule with another name.
template <class Managed>
Managed* take(py::handle capsule, const char* name, const char* used_name) {
  if (!PyCapsule_IsValid(capsule.ptr(), name)) return nullptr;
  auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  PyCapsule_SetName(capsule.ptr(), used_name);
  return managed;
}

// Returns true for NumPy's masked arrays, whose memory also holds the masked values. The class ndarray itself is no
// heap type.
bool is_masked(py::handle object) {
  if (PyType_HasFeature(Py_TYPE(object.ptr()), Py_TPFLAGS_HEAPTYPE) == 0) return false;
  const py::handle module = PyDict_GetItemString(PyImport_GetModuleDict(), "numpy.ma");
  if (!module) return false;
  const py::object type = py::getattr(module, "MaskedArray", py::none());
  return !type.is_none() && py::isinstance(object, type);
}

// Returns true for an array on a GPU that says that it may be written.
bool is_writable_on_gpu(py::handle object) {
  static const Attribute interface("__cuda_array_interface__");
  const py::object dict = interface.of_any(object);
  if (!dict || !py::isinstance<py::dict>(dict)) return false;
  const py::handle entry = PyDict_GetItemString(dict.ptr(), "data");  // the pointer, and whether it is read-only
  return entry && py::isinstance<py::tuple>(entry) && PyTuple_Size(entry.ptr()) == 2 &&
         PyTuple_GetItem(entry.ptr(), 1) == Py_False;
}

// Returns the view as uint16 of a NumPy array of another package's bfloat16, which NumPy does not export as a buffer.
// Returns null for any other object.
py::object bfloat16_bits(py::handle object) {
  static const Attribute dtype("dtype"), name("name");
  const py::handle numpy = PyDict_GetItemString(PyImport_GetModuleDict(), "numpy");
  if (!numpy || !py::isinstance(object, numpy.attr("ndarray"))) return {};
  const py::object dtype_name = name.of(dtype.of(object));
  return dtype_name.equal(py::str("bfloat16")) ? object.attr("view")("uint16") : py::object();
}

void release_reference(void* object) { Py_DECREF(static_cast<PyObject*>(object)); }

thread_local Call* current_call = nullptr;

// Returns the current stream of the object's library on a device; 0: the default stream.
std::uintptr_t stream_of(py::handle object, int device) {
  const std::string module = py::str(py::type::handle_of(object).attr("__module__"));
  const std::string library = module.substr(0, module.find('.'));
  const bool is_cupy = library == "cupy";
  if (!is_cupy && library != "torch") return 0;
  const py::object cuda = py::module_::import(library.c_str()).attr("cuda");
  const py::object stream = cuda.attr(is_cupy ? "get_current_stream" : "current_stream")(device);
  return stream.attr(is_cupy ? "ptr" : "cuda_stream").cast<std::uintptr_t>();
}

}  // namespace

Call::Call() : outer_(current_call) { current_call = this; }
Call::~Call() {
  current_call = outer_;
  use_stream(nullptr);
}

std::uintptr_t Call::stream_for(py::handle object, int device) {
  Call* const call = current_call;
  if (call != nullptr && !call->known_) call->set_stream(stream_of(object, device));
  return call == nullptr || call->stream_ == 0 ? 1 : call->stream_;
}

bool Call::has_stream_of(const dlpack::Exchange& library, int device) {
  Call* const call = current_call;
  void* stream = nullptr;
  if (call == nullptr || library.current_stream == nullptr) return false;
  if (library.current_stream(dlpack::kCuda, device, &stream) != 0) {
    PyErr_Clear();  // __dlpack__ raises the error
    return false;
  }
  if (!call->known_) call->set_stream(reinterpret_cast<std::uintptr_t>(stream));
  return call->stream_ == reinterpret_cast<std::uintptr_t>(stream);
}

void Call::set_stream(std::uintptr_t stream) {
  stream_ = stream;
  known_ = true;
  use_stream(reinterpret_cast<void*>(stream));
}

Array::Array(Argument argument, py::handle object, Access access, Shape shape) : argument_(argument) {
  read_foreign([this] { return title(); }, [&] { acquire(object, access, shape); });
  const auto unit = static_cast<std::uintptr_t>(kind_ == Kind::type ? bytes(type_) : 1);
  if (access == Access::lend && reinterpret_cast<std::uintptr_t>(data_) % unit != 0) fail("is not aligned");
}

void Array::acquire(py::handle object, Access access, Shape shape) {
  if (const Buffer* const buffer = Buffer::in(object)) {
    if (writes(access) && buffer->frozen()) fail("is read-only, but is written");
    owner_ = {object.inc_ref().ptr(), release_reference};
    const View<void> view = buffer->view();
    check_shape(1, &view.size);
    data_ = view.data;
    size_ = view.size;
    device_ = view.device;
    type_ = view.type;
    kind_ = Kind::type;
    return;
  }
  if (from_numpy(object, access, shape)) return;
  if (PyObject_CheckBuffer(object.ptr())) {
    if (is_masked(object)) fail("is a masked array: give its filled() values");
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) == 0) {
      from_buffer(access, shape);
      return;
    }
    PyErr_Clear();
    const py::object bits = bfloat16_bits(object);
    if (bits && PyObject_GetBuffer(bits.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) == 0) {
      from_buffer(access, shape);
      set_type("bfloat16");
      return;
    }
    PyErr_Clear();
    // An unversioned DLPack tensor has no flag for read-only memory, and JAX's arrays are read-only. CuPy's arrays on a
    // GPU have a buffer protocol that fails.
    if ((writes(access) && !is_writable_on_gpu(object)) || !py::hasattr(object, "__dlpack__"))
      fail("does not give its memory through the buffer protocol");
  }
  if (from_exchange(object, access, shape)) return;
  if (is_at_once(access)) fail("is no array on the host, or does not give its memory at once");
  if (!py::hasattr(object, "__dlpack__"))
    fail("is a " + std::string(Py_TYPE(object.ptr())->tp_name) + ", expected an array (buffer protocol or DLPack)");
  from_dlpack(object, access, shape);
}

View<void> Array::view() const {
  if (kind_ != Kind::type) wrong_type("float32, float64, float16 or bfloat16");
  return {data_, size_, device_, type_};
}

Target Array::target(bool integers) const {
  if (kind_ == Kind::type || !integers) return {view().data, size_, static_cast<Number>(type_)};
  static const std::pair<const char*, Number> kIntegers[] = {
      {"bool", Number::boolean},  {"bool8", Number::boolean}, {"int8", Number::int8},
      {"int16", Number::int16},   {"uint16", Number::uint16}, {"int32", Number::int32},
      {"uint32", Number::uint32}, {"int64", Number::int64},   {"uint64", Number::uint64}};
  if (kind_ == Kind::bytes) return {data_, size_, Number::uint8};
  for (const auto& [type_name, number] : kIntegers)
    if (other_name_ == type_name) return {data_, size_, number};
  wrong_type("a float, an integer or a bool");
}

View<double> Array::doubles() const {
  if (kind_ != Kind::type || type_ != Type::float64) wrong_type("float64");
  return {static_cast<double*>(data_), size_, device_};
}

void Array::check_on(Device device) const {
  if (device_ != device)
    throw Unavailable(title() + " is on " + check::where(device_) + ", expected " + check::where(device));
}

View<unsigned char> Array::row(Codec codec) const {
  const std::string row_type = info(codec.coding).row_type;
  const bool is_own = kind_ == Kind::type && afflux::name(type_) == row_type;
  if (kind_ != Kind::bytes && !is_own) wrong_type(row_type == "uint8" ? row_type : "uint8 or " + row_type);
  return {static_cast<unsigned char*>(data_), size_ * (is_own ? bytes(type_) : 1), device_};
}

std::string Array::title() const {
  return "[" + std::string(argument_.op) + "] " + check::Name(argument_.name, argument_.index, argument_.part).str();
}

void Array::fail(const std::string& problem) const { throw Error(title() + " " + problem); }

void Array::wrong_type(const std::string& expected) const {
  const std::string actual = kind_ == Kind::type ? afflux::name(type_) : kind_ == Kind::bytes ? "uint8" : other_name_;
  fail("is " + actual + ", expected " + expected);
}

template <class Int>
void Array::check_shape(int dimensions, const Int* shape) const {
  if (argument_.shape && !has_shape(argument_.shape, dimensions, shape)) fail("has another shape than expected");
}

template <class Int>
void Array::set_shape(int dimensions, const Int* shape, const Int* strides, std::int64_t unit, Shape expected) {
  check_shape(dimensions, shape);
  if (expected == Shape::vector && dimensions != 1)
    fail("has " + std::to_string(dimensions) + " dimensions, expected 1");
  size_ = elements(dimensions, shape);
  if (size_ < 0) fail("has more elements than memory holds");
  if (is_contiguous(dimensions, shape, strides, unit)) return;
  fail(dimensions > 1 ? "is not C-contiguous"
                      : "is strided (step of " + std::to_string(strides[0] * item_size_ / unit) +
                            " bytes), expected a contiguous vector");
}

void Array::set_type(const std::string& name) {
  kind_ = name == "uint8" ? Kind::bytes : Kind::other;
  for (const Type type : {Type::float32, Type::float64, Type::float16, Type::bfloat16}) {
    if (name != afflux::name(type)) continue;
    kind_ = Kind::type;
    type_ = type;
  }
  if (kind_ == Kind::other) other_name_ = name;
}

void Array::from_buffer(Access access, Shape shape) {
  owner_ = {&buffer_, [](void* p) { PyBuffer_Release(static_cast<Py_buffer*>(p)); }};
  if (writes(access) && buffer_.readonly) fail("is read-only, but is written");
  set_type(name_of_format(native_format(buffer_.format)));
  item_size_ = buffer_.itemsize;
  // ctypes arrays have no strides even if PyBUF_STRIDES is requested: they are C-contiguous.
  set_shape(buffer_.ndim, buffer_.shape, buffer_.strides, buffer_.itemsize, shape);
  data_ = buffer_.buf;
}

// Returns false for arrays that must be rejected, too: from_buffer reports their errors.
bool Array::from_numpy(py::handle object, Access access, Shape shape) {
  const auto array = numpy_array(object, writes(access));
  if (!array || (shape == Shape::vector && array->dimensions != 1) ||
      (argument_.shape && !has_shape(argument_.shape, array->dimensions, array->shape)))
    return false;
  kind_ = Kind::type;
  type_ = array->type;
  item_size_ = afflux::bytes(type_);
  data_ = array->data;
  size_ = elements(array->dimensions, array->shape);
  owner_ = {object.inc_ref().ptr(), release_reference};
  return true;
}

bool Array::from_exchange(py::handle object, Access access, Shape shape) {
  dlpack::Tensor tensor{};
  const dlpack::Exchange* const library = describe(object, &tensor);
  if (library == nullptr) return false;
  if (tensor.device.type == dlpack::kCuda) {
    // If the library uses another stream than the call, __dlpack__ must order the two.
    if (is_at_once(access) || !Call::has_stream_of(*library, tensor.device.id)) return false;
    set_gpu(tensor.device.id);
  } else if (tensor.device.type != dlpack::kCpu) {
    return false;
  }
  if (access == Access::write) check_no_grad(object);
  set_tensor(tensor, shape);
  py::object storage = torch_storage(object);
  // The storage is held, not the tensor: another thread may give the tensor another storage (set_, .data =).
  if (!storage) storage = py::reinterpret_borrow<py::object>(object);
  owner_ = {storage.release().ptr(), release_reference};
  return true;
}

void Array::from_dlpack(py::handle object, Access access, Shape shape) {
  py::object capsule, detached;
  try {
    const auto where = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
    const bool cuda = where.first == dlpack::kCuda || where.first == dlpack::kCudaManaged;
    if (cuda) {
      set_gpu(where.second);
    } else if (where.first != dlpack::kCpu && where.first != dlpack::kCudaHost) {
      fail("is on DLPack device type " + std::to_string(where.first) + ", expected the CPU or CUDA");
    }
    if (access == Access::write) {
      check_no_grad(object);
    } else if (requires_grad(object)) {  // torch does not export such tensors
      detached = object.attr("detach")();
      object = detached;
    }
    py::dict options;
    if (cuda) options["stream"] = Call::stream_for(object, where.second);
    try {
      capsule = object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0), **options);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError) || is_from_signal(error)) throw;
      capsule = object.attr("__dlpack__")(**options);
    }
  } catch (py::error_already_set& error) {
    // A KeyboardInterrupt is not an error of the array.
    if (!error.matches(PyExc_Exception) || is_from_signal(error)) throw;
    fail("does not give its memory through DLPack: " + std::string(py::str(error.value())));
  } catch (const py::cast_error&) {
    fail("has a __dlpack_device__ that does not return two integers");
  }

  dlpack::Tensor tensor{};
  bool read_only = false;
  if (auto* const versioned =
          take<dlpack::ManagedVersioned>(capsule, "dltensor_versioned", "used_dltensor_versioned")) {
    owner_ = {versioned, delete_managed<dlpack::ManagedVersioned>};
    if (versioned->major != 1) fail("comes as DLPack version " + std::to_string(versioned->major) + ", expected 1");
    tensor = versioned->tensor;
    read_only = (versioned->flags & dlpack::kReadOnly) != 0;
  } else if (auto* const managed = take<dlpack::Managed>(capsule, "dltensor", "used_dltensor")) {
    owner_ = {managed, delete_managed<dlpack::Managed>};
    tensor = managed->tensor;
  } else {
    fail("gave something that is no DLPack capsule");
  }

  if (access == Access::write && read_only) fail("is read-only, but is written");
  set_tensor(tensor, shape);
  torch_storage(object);
}

void Array::set_gpu(int index) {
  device_ = {DeviceKind::cuda, index};
  const std::string missing = why_not(device_);
  if (!missing.empty()) throw Unavailable(title() + " is on cuda:" + std::to_string(index) + ", but " + missing);
}

// Throws Error for a tensor that requires grad: autograd would not notice that it is written.
void Array::check_no_grad(py::handle object) const {
  if (requires_grad(object)) fail("requires grad, but is written: detach() it");
}

void Array::set_tensor(const dlpack::Tensor& tensor, Shape shape) {
  if (float_of(tensor.dtype, &type_))
    kind_ = Kind::type;
  else
    set_type(name_of(tensor.dtype));
  item_size_ = tensor.dtype.bits / 8;
  set_shape(tensor.ndim, tensor.shape, tensor.strides, 1, shape);
  if (tensor.data != nullptr) data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
}

// Checks torch tensors for two facts that DLPack does not describe: a tensor may be lazily negated, and its storage may
// have been shrunk.
py::object Array::torch_storage(py::handle object) const {
  static const Attribute untyped_storage("untyped_storage"), storage_offset("storage_offset");
  py::object storage = untyped_storage.call_any(object);
  if (!storage) return storage;
  if (is_negative(object)) fail("has torch's negative bit set: resolve_neg() it");
  const auto offset = storage_offset.call_any(object).cast<std::int64_t>();
  const Py_ssize_t bytes = PyObject_Size(storage.ptr());  // in bytes
  if (bytes < 0) throw py::error_already_set();
  if (size_ > 0 && (offset + size_) * item_size_ > bytes)
    fail("has a storage of " + std::to_string(bytes) + " bytes, which ends before the tensor does");
  return storage;
}

}  // namespace afflux::python
