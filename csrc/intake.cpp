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

// Returns the arrays of a tree, of any shapes. Returns None for a tree that is left to Python.
py::object Intake::arrays_of(py::handle tree, bool is_model) const {
  // An OrderedDict may be a module's state_dict, which is no update or gradient.
  if (is_none(table) || (PyODict_CheckExact(tree.ptr()) && !is_model)) return py::none();
  return table.cast<const ArrayTable&>().find(tree);
}

py::handle Intake::shapes() const { return table.cast<const ArrayTable&>().shapes; }

bool Ledger::is_plain(py::handle client, py::handle version, py::handle num_examples, py::handle loss) const {
  const std::optional<std::int64_t> pulled = plain_int(version), examples = plain_int(num_examples);
  return is_plain_id(client) && pulled && examples && *examples >= 1 && *pulled >= 0 && *pulled <= this->version() &&
         (is_none(loss) || (PyFloat_CheckExact(loss.ptr()) && std::isfinite(PyFloat_AS_DOUBLE(loss.ptr()))));
}

// The slot of a plain push, and what is known of its vector.
struct Ledger::Taken {
  py::object slot, norm = texts->nan, low = texts->nan, high = texts->nan;
};

// The facts of a push, which are held.
struct Ledger::Received {
  std::array<py::object, kFacts> facts;

  Pushed borrowed() const {
    Pushed pushed;
    std::copy(facts.begin(), facts.end(), pushed.begin());
    return pushed;
  }
  py::object tuple() const { return tuple_of<kFacts>(reinterpret_cast<PyObject*>(&PyTuple_Type), borrowed()); }
};

// Copies a flat array, or the arrays of a tree, into a slot. Returns nothing for a push that is left to Python. Lists
// the memory that it has read, if `memory` is not null.
std::optional<Ledger::Taken> Ledger::copied(const NumpyArray* array, const py::object& arrays,
                                            std::vector<Memory>* memory) const {
  py::object held_slot;
  for (const auto& pool : intake_->pools)
    if (!held_slot && !pool->full()) held_slot = Buffer::taken(pool);
  if (!held_slot) return {};
  const Buffer* const slot = Buffer::in(held_slot);
  std::optional<const Arrays<const void>> parts;
  try {
    if (array == nullptr)
      parts.emplace("push", "vector", arrays, Access::lend, Shape::any, false, as_view, intake_->shapes());
  } catch (const Error&) {  // Python finds the reason
    return {};
  }
  const View<const void> source =
      array != nullptr ? View<const void>{array->data, intake_->size, {}, array->type} : View<const void>{};
  const List<View<const void>> sources = parts ? parts->list() : List<View<const void>>{&source, 1};
  if (memory != nullptr)
    for (std::int64_t i = 0; i < sources.size; ++i)
      memory->push_back({sources.data[i].data, sources.data[i].size * bytes(sources.data[i].type)});
  const auto sweep = [&, threads = intake_->num_threads] {
    if (parts) return ingest(sources, slot->view(), threads, nullptr, slot->until_read());
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
  const double max_abs = intake_->max_abs, norm = std::sqrt(statistics.sum_of_squares);
  if (statistics.first_nonfinite >= 0 || -max_abs > statistics.min || statistics.max > max_abs ||
      norm > intake_->max_norm || statistics.sum_of_squares > intake_->most_squares)
    return {};
  return Taken{std::move(held_slot), real(norm), real(statistics.min), real(statistics.max)};
}

// Lends the arrays to the round. Returns nothing for a push that is left to Python.
std::optional<Ledger::Taken> Ledger::lent(const py::object& arrays, const py::object& conversion, bool is_flat,
                                          std::vector<Memory>& memory) const {
  std::unique_ptr<PartsObject> parts;
  try {
    const PartsObject& like = *PartsObject::in(intake_->parts);
    parts = std::make_unique<PartsObject>(like, is_flat ? py::object(py::make_tuple(arrays)) : arrays, conversion,
                                          is_flat ? py::handle() : intake_->shapes(), like.dtype);
  } catch (const Error&) {  // Python finds the reason
    return {};
  }
  for (const PartView& part : parts->lent->list()) memory.push_back({part.data, part.size * bytes(part.type)});
  return Taken{py::cast(std::move(parts))};
}

// Returns the vector of this kind; None if another one is given.
py::handle Ledger::vector_of(std::size_t kind, const Vectors& vectors) {
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

// Returns the facts of a push, and sets the id of its `task`, if it has one. Its arrays are copied into a slot, or
// those of a step are read where they are. Returns nothing for a push that is left to Python.
std::optional<Ledger::Received> Ledger::taken(Given given, py::object& task, StepPushes* step) const {
  static const Name id("id"), client_id("client_id"), version("version"), params("params");
  py::object pulled = given.version;
  if (!is_none(given.task)) {
    const bool is_id = PyUnicode_CheckExact(given.task.ptr()) != 0;
    if (!is_id && !is_exactly(given.task, intake_->task)) return {};
    task = is_id ? given.task : id.of(given.task);
    const py::object opened = this->opened(task);
    if (is_none(opened) || !is_none(given.client) || !is_none(given.version)) return {};
    given.client = client_id.of(opened);
    given.version = pulled = version.of(opened);
  } else if (is_exactly(pulled, intake_->pulled)) {
    pulled = version.of(pulled);
  }
  if (!is_plain(given.client, pulled, given.num_examples, given.loss)) return {};
  const bool copies = step == nullptr || !step->in_place;
  const bool converts = !copies && intake_->wanted == 0 && !is_none(given.vectors[Intake::kModel]);
  const std::size_t kind = converts ? Intake::kModel : intake_->wanted;
  const py::handle vector = vector_of(kind, given.vectors);
  if (converts) {
    py::object own = pulled_by(given);
    if (is_none(own)) return {};
    if (!own.is(step->base)) step->conversion = py::make_tuple("model", "update", params.of(own), 1.0);
    step->base = std::move(own);
  }
  const auto array = numpy_array(vector, false);
  if (array && (array->dimensions != 1 || array->shape[0] != intake_->size || !(copies || is_none(intake_->table))))
    return {};
  const py::object arrays = array ? held(vector) : intake_->arrays_of(vector, kind == Intake::kModel);
  if (is_none(arrays)) return {};
  std::optional<Taken> read =
      copies ? copied(array ? &*array : nullptr, arrays, step == nullptr ? nullptr : &step->memory.emplace_back())
             : lent(arrays, converts ? step->conversion : py::none(), array.has_value(), step->memory.emplace_back());
  if (!read) return {};
  return Received{{std::move(given.client), std::move(pulled), std::move(given.num_examples),
                   is_none(given.loss) ? texts->nan : given.loss, std::move(read->norm), std::move(read->slot),
                   py::none(), owned(PyTuple_Pack(2, read->low.ptr(), read->high.ptr())), texts->zero, texts->empty}};
}

py::object Ledger::take_all(py::handle entries, py::handle in_place) const {
  StepPushes step{is_set(in_place)};
  if (!intake_ || (step.in_place ? is_none(intake_->parts) : now_.rows.reads_ahead) ||
      !PyList_CheckExact(entries.ptr()))
    return py::none();
  std::vector<std::optional<Given>> all;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries.ptr()); ++i) {
    const py::object entry = held(PyList_GET_ITEM(entries.ptr(), i));
    all.push_back(Given::in(entry, intake_->wanted));
    if (!all.back() && !step.in_place) return py::none();  // before anything is copied
  }
  py::list pushes;
  py::set tasks;
  for (std::optional<Given>& given : all) {
    py::object task = py::none();
    const auto facts = given ? taken(std::move(*given), task, &step) : std::nullopt;
    if (!facts && !step.in_place) return py::none();
    pushes.append(facts ? py::object(py::make_tuple(facts->tuple(), task)) : py::none());
    if (facts && !is_none(task)) {
      if (tasks.contains(task)) return py::none();  // only one of them joins
      tasks.add(task);
    }
  }
  if (share_memory(step.memory)) return py::none();  // Python finds out which
  return std::move(pushes);
}

py::object Ledger::push(py::handle task, py::handle client, py::handle version, py::handle update, py::handle gradient,
                        py::handle model, py::handle num_examples, py::handle loss, py::handle decided) {
  if (!PyList_CheckExact(decided.ptr()) || PyList_GET_SIZE(decided.ptr()) != 1)
    throw py::type_error("[Ledger] decided is no list of one");
  if (!may_take_in()) return py::none();
  py::object id = py::none();
  const auto facts = taken({held(task),
                            held(client),
                            held(version),
                            held(num_examples),
                            held(loss),
                            {held(update), held(gradient), held(model)}},
                           id, nullptr);
  if (!facts) return py::none();
  py::object receipt = joined(facts->borrowed(), py::none(), id, py::none(), /*any_status=*/false);
  if (is_none(receipt)) return py::make_tuple(facts->tuple(), id);
  PyList_SetItem(decided.ptr(), 0, receipt.inc_ref().ptr());
  return receipt;
}

void Ledger::take_vectors(py::handle intake) {
  check_tuple(intake, 11, "an intake");
  intake_ = Intake{static_cast<std::size_t>(kind_named("take_vectors", item(intake, 0).cast<std::string>())),
                   count_of(item(intake, 1)),
                   item(intake, 2).cast<int>(),
                   item(intake, 3).cast<double>(),
                   item(intake, 4).cast<double>(),
                   item(intake, 5).cast<double>(),
                   item(intake, 6).cast<Pools>(),
                   held(item(intake, 7)),
                   held(item(intake, 8)),
                   held(item(intake, 9)),
                   held(item(intake, 10))};
}

}  // namespace afflux::python
