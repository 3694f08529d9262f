// The pushes of plain vectors: the check of the arguments, the sweep that copies the vector, and the join.
#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "afflux/afflux.hpp"
#include "array_table.hpp"
#include "arrays.hpp"
#include "ledger.hpp"
#include "numpy_array.hpp"
#include "parts.hpp"
#include "release.hpp"
#include "shared_memory.hpp"

namespace py = pybind11;

namespace afflux::python {

bool Ledger::may_take_in() const {
  return intake_ && lock_->may_enter() && !closed_ && is_none(failure_) && next_deadline() == HUGE_VAL &&
         !now_.rows.reads_ahead;
}

// Returns the arrays of a tree, as the engine reads them. Returns None for a tree that is left to Python.
py::object Intake::arrays_of(py::handle tree, bool is_model) const {
  // An OrderedDict may be a module's state_dict, which is no update or gradient.
  if (is_none(table) || (PyODict_CheckExact(tree.ptr()) && !is_model)) return py::none();
  return table.cast<const ArrayTable&>().find_ready(tree);
}

bool Ledger::is_plain(py::handle client, py::handle version, py::handle num_examples, py::handle loss) const {
  const std::optional<std::int64_t> pulled = plain_int(version), examples = plain_int(num_examples);
  return is_plain_id(client) && pulled && examples && *examples >= 1 && *pulled >= 0 && *pulled <= this->version() &&
         (is_none(loss) || (PyFloat_CheckExact(loss.ptr()) && std::isfinite(PyFloat_AS_DOUBLE(loss.ptr()))));
}

py::object Ledger::pushed(py::handle client, py::handle version, py::handle num_examples, py::handle loss,
                          py::handle norm, py::handle slot, py::handle extremes) {
  const py::handle known_loss = is_none(loss) ? py::handle(texts->nan) : loss;
  return tuple_of<kFacts>(
      reinterpret_cast<PyObject*>(&PyTuple_Type),
      {client, version, num_examples, known_loss, norm, slot, py::none(), extremes, texts->zero, texts->empty});
}

// Copies the vector of a push into a slot, and returns the facts of the push. Returns None for a push that is left to
// Python.
py::object Ledger::taken_in(py::handle client, py::handle version, py::handle vector, py::handle num_examples,
                            py::handle loss) const {
  if (!is_plain(client, version, num_examples, loss)) return py::none();
  const auto array = numpy_array(vector, false);
  if (array && (array->dimensions != 1 || array->shape[0] != intake_->size)) return py::none();
  const py::object arrays =
      array ? held(vector) : intake_->arrays_of(vector, intake_->wanted == Intake::kModel);  // held while others run
  if (is_none(arrays)) return py::none();
  std::unique_ptr<Buffer> slot;
  for (const py::handle each : intake_->pools) {
    if (const auto pool = each.cast<std::shared_ptr<Pool>>(); !pool->full()) {
      slot = std::make_unique<Buffer>(pool);
      break;
    }
  }
  if (!slot) return py::none();
  std::optional<const Arrays<const void>> parts;
  try {
    if (!array) parts.emplace("push", "vector", arrays, Access::read, Shape::any, false, as_view);
  } catch (const Error&) {  // Python finds the reason
    return py::none();
  }
  const double max_abs = intake_->max_abs, max_norm = intake_->max_norm, most_squares = intake_->most_squares;
  const auto sweep = [&, threads = intake_->num_threads] {
    if (parts) return ingest(parts->list(), slot->view(), threads, nullptr, slot->until_read());
    const View<const void> source{array->data, intake_->size, {}, array->type};
    return ingest(source, slot->view(), threads, nullptr, slot->until_read());
  };
  constexpr std::int64_t kShort = 4096;  // elements; the copy takes less time than releasing the GIL and taking it
  Statistics statistics;
  if (intake_->size <= kShort) {
    statistics = sweep();
  } else {
    const GilRelease release;
    statistics = sweep();
  }
  const double norm = std::sqrt(statistics.sum_of_squares);
  if (statistics.first_nonfinite >= 0 || -max_abs > statistics.min || statistics.max > max_abs || norm > max_norm ||
      statistics.sum_of_squares > most_squares)
    return py::none();
  const py::object buffer = py::cast(std::move(slot)), low = real(statistics.min), high = real(statistics.max);
  const py::object extremes = owned(PyTuple_Pack(2, low.ptr(), high.ptr()));
  return pushed(client, version, num_examples, loss, real(norm), buffer, extremes);
}

// Returns the vector of this kind; None if another one is given.
py::handle Ledger::vector_of(std::size_t kind, py::handle update, py::handle gradient, py::handle model) {
  const std::array<py::handle, 3> vectors{update, gradient, model};
  for (std::size_t i = 0; i < vectors.size(); ++i)
    if (i != kind && !is_none(vectors[i])) return Py_None;
  return vectors[kind];
}

// Reads (client, version, vector), or a dict of at most a client or a task, a version, vectors, num_examples and a
// loss. Returns nothing for an entry that is left to Python. `wanted`: the kind of the vector of a tuple.
std::optional<Given> Given::in(py::handle entry, std::size_t wanted) {
  Given given;
  if (PyTuple_CheckExact(entry.ptr()) && PyTuple_GET_SIZE(entry.ptr()) == 3) {
    given.client = held(item(entry, 0));
    given.version = held(item(entry, 1));
    given.vectors[wanted] = held(item(entry, 2));
    return given;
  }
  if (!PyDict_CheckExact(entry.ptr())) return {};
  const std::pair<const char*, py::object*> fields[] = {{"client", &given.client},
                                                        {"task", &given.task},
                                                        {"version", &given.version},
                                                        {"update", &given.vectors[0]},
                                                        {"model", &given.vectors[2]},
                                                        {"gradient", &given.vectors[1]},
                                                        {"num_examples", &given.num_examples},
                                                        {"loss", &given.loss}};
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(entry.ptr(), &place, &name, &value) != 0;) {
    if (!PyUnicode_CheckExact(name)) return {};
    const auto* const field = std::find_if(std::begin(fields), std::end(fields), [name](const auto& each) {
      return PyUnicode_CompareWithASCIIString(name, each.first) == 0;
    });
    if (field == std::end(fields)) return {};
    *field->second = held(value);
  }
  return given;
}

// Returns the version that the client of a push has pulled; None if it is not held.
py::object Ledger::pulled_by(const Given& given) const {
  static const Name copied("copied");
  if (is_exactly(given.version, intake_->pulled)) return given.version;
  if (is_exactly(given.task, intake_->task))
    if (py::object copy = copied.of(given.task); !is_none(copy)) return copy;
  return count_of(given.version) == version() ? now_.current : base(given.version);
}

// Returns (the facts of a push, the id of its task or None), whose arrays the round reads where they are. Returns None
// for a push that is left to Python. `base` and `conversion` are those of the push before.
py::object Ledger::lent(const Given& arguments, py::object& base, py::object& conversion) const {
  static const Name id("id"), client_id("client_id"), version("version"), params("params");
  Given given = arguments;
  py::object task = py::none(), pulled = given.version;
  if (!is_none(given.task)) {
    const bool is_id = PyUnicode_CheckExact(given.task.ptr()) != 0;
    if (!is_id && !is_exactly(given.task, intake_->task)) return py::none();
    task = is_id ? given.task : id.of(given.task);
    const py::object opened = this->opened(task);
    if (is_none(opened) || !is_none(given.client) || !is_none(given.version)) return py::none();
    given.client = client_id.of(opened);
    given.version = pulled = version.of(opened);
  } else if (is_exactly(pulled, intake_->pulled)) {
    pulled = version.of(pulled);
  }
  if (!is_plain(given.client, pulled, given.num_examples, given.loss)) return py::none();
  const bool converts = intake_->wanted == 0 && !is_none(given.vectors[Intake::kModel]);
  const std::size_t kind = converts ? Intake::kModel : intake_->wanted;
  const py::handle vector = vector_of(kind, given.vectors[0], given.vectors[1], given.vectors[2]);
  if (converts) {
    py::object own = pulled_by(given);
    if (is_none(own)) return py::none();
    if (!own.is(base)) conversion = py::make_tuple("model", "update", params.of(own), 1.0);
    base = std::move(own);
  }
  const auto array = numpy_array(vector, false);
  const bool is_flat = array && array->dimensions == 1 && array->shape[0] == intake_->size && is_none(intake_->table);
  const py::object arrays = is_flat ? py::make_tuple(vector)
                            : array ? py::none()
                                    : intake_->arrays_of(vector, kind == Intake::kModel);
  if (is_none(arrays)) return py::none();
  const PartsObject& like = *PartsObject::in(intake_->parts);
  const py::object slot = py::cast(std::make_unique<PartsObject>(like, arrays, converts ? conversion : py::none())),
                   extremes = owned(PyTuple_Pack(2, texts->nan.ptr(), texts->nan.ptr()));
  return py::make_tuple(pushed(given.client, pulled, given.num_examples, given.loss, texts->nan, slot, extremes), task);
}

py::object Ledger::lend(py::handle entries) const {
  if (!intake_ || is_none(intake_->parts) || !PyList_CheckExact(entries.ptr())) return py::none();
  py::list pushes, arrays;
  py::object base = py::none(), conversion = py::none();
  py::set tasks;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries.ptr()); ++i) {
    const py::object entry = held(PyList_GET_ITEM(entries.ptr(), i));
    const std::optional<Given> given = Given::in(entry, intake_->wanted);
    const py::object push = given ? lent(*given, base, conversion) : py::none();
    pushes.append(push);
    if (is_none(push)) continue;
    if (const py::handle task = item(push, 1); !is_none(task)) {
      if (tasks.contains(task)) return py::none();  // only one of them joins
      tasks.add(task);
    }
    arrays.append(py::list(PartsObject::in(item(item(push, 0), kSlot))->arrays));
  }
  if (shared_memory(arrays)) return py::none();  // Python finds out which
  return std::move(pushes);
}

py::object Ledger::push(py::handle client, py::handle version, py::handle update, py::handle gradient, py::handle model,
                        py::handle num_examples, py::handle loss) {
  if (!may_take_in()) return py::none();
  py::object taken = taken_in(client, version, vector_of(intake_->wanted, update, gradient, model), num_examples, loss);
  if (is_none(taken)) return taken;
  py::object receipt = joined(taken, py::none(), py::none(), py::none(), /*any_status=*/false);
  return is_none(receipt) ? taken : receipt;
}

void Ledger::take_vectors(py::handle intake) {
  check_tuple(intake, 11, "an intake");
  const auto kind = item(intake, 0).cast<std::string>();
  intake_ = Intake{kind == "update"     ? std::size_t{0}
                   : kind == "gradient" ? std::size_t{1}
                                        : Intake::kModel,
                   count_of(item(intake, 1)),
                   item(intake, 2).cast<int>(),
                   item(intake, 3).cast<double>(),
                   item(intake, 4).cast<double>(),
                   item(intake, 5).cast<double>(),
                   py::tuple(pools_of(item(intake, 6))),
                   held(item(intake, 7)),
                   held(item(intake, 8)),
                   held(item(intake, 9)),
                   held(item(intake, 10))};
}

}  // namespace afflux::python
