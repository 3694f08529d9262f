#include "buffers.hpp"

#include <pybind11/stl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <string>

#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "attributes.hpp"
#include "descriptors.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

constexpr std::size_t kLine = 64, kPage = 4096, kHugePage = std::size_t{1} << 21;

// Returns the alignment of the block of a vector with this number of bytes. Large blocks request huge pages, because a
// sweep over many streams would otherwise wait for the TLB.
std::size_t border(std::size_t bytes) { return bytes >= kHugePage ? kHugePage : bytes >= kPage ? kPage : kLine; }

// Returns the offset of the next vector in its page. Each vector of a page or more begins at another line of its page
// than the vectors before it: streams at the same offset would share the few ways of one set of L1 (bench/NOTES.md).
std::size_t next_place() {
  static std::atomic<std::size_t> count{0};
  constexpr std::size_t kApart = 43, kLines = kPage / kLine;  // no common factor
  return count.fetch_add(1, std::memory_order_relaxed) * kApart % kLines * kLine;
}

void* allocate(std::size_t bytes) {
  const std::size_t alignment = border(bytes), place = alignment > kLine ? next_place() : 0;
  const std::size_t rounded = (place + bytes + alignment - 1) / alignment * alignment;
  void* const block = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (block == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (alignment == kHugePage) madvise(block, rounded, MADV_HUGEPAGE);  // a failure changes only the speed
#endif
  return static_cast<unsigned char*>(block) + place;
}

void release(void* memory, std::size_t bytes) {
  std::free(static_cast<unsigned char*>(memory) - reinterpret_cast<std::uintptr_t>(memory) % border(bytes));
}

Type type_named(const std::string& name) {
  for (const Type type : {Type::float32, Type::float64, Type::bfloat16})
    if (name == afflux::name(type)) return type;
  throw Error("[Pool] dtype is '" + name + "', must be float32, float64 or bfloat16");
}

// The class _engine.Buffer. It is none of pybind11's, which keeps a table of all objects by address: a tenth of a push.
struct BufferObject {
  PyObject_HEAD Buffer buffer;
  Py_ssize_t shape;  // of the views
};

PyTypeObject* buffer_type = nullptr;  // set once, by bind_buffers

BufferObject* buffer_in(PyObject* object) { return reinterpret_cast<BufferObject*>(object); }

PyObject* make_buffer(PyTypeObject*, PyObject* arguments, PyObject* named) {
  static const char* const names[] = {"pool", nullptr};
  PyObject* pool = nullptr;
  if (PyArg_ParseTupleAndKeywords(arguments, named, "O:Buffer", const_cast<char**>(names), &pool) == 0) return nullptr;
  return guarded([pool] {
    auto source = py::handle(pool).cast<std::shared_ptr<Pool>>();
    if (!source) throw py::type_error("pool is None");
    return Buffer::taken(std::move(source));
  });
}

void free_buffer(PyObject* self) {
  buffer_in(self)->buffer.~Buffer();
  buffer_type->tp_free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(buffer_type));
}

PyObject* freeze_buffer(PyObject* self, PyObject*) {
  buffer_in(self)->buffer.freeze();
  Py_RETURN_NONE;
}

int view_buffer(PyObject* self, Py_buffer* view, int flags) {
  BufferObject* const object = buffer_in(self);
  const View<void> memory = object->buffer.view();
  const Py_ssize_t item = bytes(memory.type);
  if (PyBuffer_FillInfo(view, self, memory.data, memory.size * item, object->buffer.frozen(), flags) != 0) return -1;
  view->itemsize = item;
  if ((flags & PyBUF_FORMAT) != 0)
    view->format = const_cast<char*>(memory.type == Type::float32 ? "f" : memory.type == Type::float64 ? "d" : "H");
  if (view->shape != nullptr) view->shape = &object->shape;
  return 0;
}

PyTypeObject* make_buffer_type() {
  static PyMethodDef methods[] = {{"freeze", freeze_buffer, METH_NOARGS, nullptr}, {}};
  static PyGetSetDef attributes[] = {
      {"dtype", [](PyObject* self, void*) { return PyUnicode_FromString(name(buffer_in(self)->buffer.view().type)); },
       nullptr, nullptr, nullptr},
      {"size", [](PyObject* self, void*) { return PyLong_FromSsize_t(buffer_in(self)->shape); }, nullptr, nullptr,
       nullptr},
      {}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make_buffer)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(free_buffer)},
                                {Py_tp_methods, methods},
                                {Py_tp_getset, attributes},
                                {Py_bf_getbuffer, reinterpret_cast<void*>(view_buffer)},
                                {}};
  static PyType_Spec spec{"afflux._engine.Buffer", sizeof(BufferObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(owned(PyType_FromSpec(&spec)).release().ptr());
}

}  // namespace

Pool::Pool(std::int64_t size, Type type, std::int64_t max_buffers, std::int64_t until_read)
    : size_(size), type_(type), max_buffers_(max_buffers), until_read_(until_read) {
  if (size < 0 || max_buffers < 0) throw Error("[Pool] size and max_buffers must not be negative");
  if (size > std::int64_t{1} << 59) throw std::bad_alloc();
}

Pool::~Pool() {
  for (void* const memory : free_)
    if (!is_of_caller(memory)) release(memory, static_cast<std::size_t>(bytes()));
}

bool Pool::is_of_caller(const void* memory) const {
  return std::any_of(lent_.begin(), lent_.end(), [memory](const py::buffer_info& info) { return info.ptr == memory; });
}

void Pool::lend(const py::buffer& memory) {
  py::buffer_info info = memory.request(true);
  if (info.ndim != 1 || info.strides[0] != info.itemsize || info.size * info.itemsize < bytes() ||
      reinterpret_cast<std::uintptr_t>(info.ptr) % static_cast<std::uintptr_t>(afflux::bytes(type_)) != 0)
    throw Error("[lend] memory must be one aligned, contiguous buffer of at least " + std::to_string(bytes()) +
                " bytes");
  free_.reserve(static_cast<std::size_t>(allocated_) + 1);
  lent_.push_back(std::move(info));
  free_.push_back(lent_.back().ptr);
  ++allocated_;
}

void* Pool::take() {
  if (!free_.empty()) {
    void* const memory = free_.back();
    free_.pop_back();
    return memory;
  }
  if (full()) throw Error("[Pool] all " + std::to_string(max_buffers_) + " buffers of max_buffers are held");
  free_.reserve(static_cast<std::size_t>(allocated_) + 1);  // so that give_back never allocates
  void* const memory = allocate(static_cast<std::size_t>(bytes()));
  ++allocated_;
  return memory;
}

std::vector<std::uintptr_t> Pool::free() const {
  std::vector<std::uintptr_t> places;
  for (void* const memory : free_) places.push_back(reinterpret_cast<std::uintptr_t>(memory));
  return places;
}

Buffer::Buffer(std::shared_ptr<Pool> pool)
    : pool_(std::move(pool)), view_(pool_->take(), pool_->size(), {}, pool_->type()) {}

Buffer::~Buffer() { pool_->give_back(view_.data); }

const Buffer* Buffer::in(py::handle object) {
  return Py_TYPE(object.ptr()) == buffer_type ? &buffer_in(object.ptr())->buffer : nullptr;
}

py::object Buffer::taken(std::shared_ptr<Pool> pool) {
  py::object made = owned(buffer_type->tp_alloc(buffer_type, 0));
  BufferObject* const object = buffer_in(made.ptr());
  try {
    new (&object->buffer) Buffer(std::move(pool));
  } catch (...) {  // without a call of the destructor
    buffer_type->tp_free(made.release().ptr());
    Py_DECREF(reinterpret_cast<PyObject*>(buffer_type));
    throw;
  }
  object->shape = object->buffer.view().size;
  return made;
}

void bind_buffers(py::module_& module) {
  const auto make = [](std::int64_t size, const std::string& dtype, std::int64_t max_buffers, std::int64_t until_read) {
    return std::make_shared<Pool>(size, type_named(dtype), max_buffers, until_read);
  };
  // The types are local to this module: a process may load another build beside it.
  py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool", py::module_local())
      .def(py::init(make), py::arg("size"), py::arg("dtype"), py::arg("max_buffers"), py::arg("until_read") = 0)
      .def("lend", &Pool::lend, py::arg("memory"))
      .def_property_readonly("held", &Pool::held)
      .def_property_readonly("free", &Pool::free)
      .def_property_readonly("allocated", &Pool::allocated)
      .def_property_readonly("buffer_bytes", &Pool::bytes);
  buffer_type = make_buffer_type();
  module.attr("Buffer") = py::handle(reinterpret_cast<PyObject*>(buffer_type));
}

}  // namespace afflux::python
