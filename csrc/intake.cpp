// The pushes of plain vectors: the check of the arguments, the sweep that copies the vector, and the join.
#include <array>
#include <cmath>
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

py::object Ledger::lend(py::handle client, py::handle version, py::handle update, py::handle gradient, py::handle model,
                        py::handle num_examples, py::handle loss, py::handle conversion) const {
  if (!intake_ || is_none(intake_->borders) || !is_plain(client, version, num_examples, loss)) return py::none();
  const std::size_t given = is_none(conversion) ? intake_->wanted : Intake::kModel;
  const py::handle vector = vector_of(given, update, gradient, model);
  const auto array = numpy_array(vector, false);
  const bool is_flat = array && array->dimensions == 1 && array->shape[0] == intake_->size && is_none(intake_->table);
  const py::object arrays = is_flat ? py::make_tuple(vector)
                            : array ? py::none()
                                    : intake_->arrays_of(vector, given == Intake::kModel);
  if (is_none(arrays)) return py::none();
  const auto parts = [&] {
    return std::make_unique<PartsObject>(arrays, intake_->borders, held(conversion), intake_->dtype);
  };
  const py::object slot = py::cast(parts()), extremes = owned(PyTuple_Pack(2, texts->nan.ptr(), texts->nan.ptr()));
  return pushed(client, version, num_examples, loss, texts->nan, slot, extremes);
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
  check_tuple(intake, 10, "an intake");
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
                   held(item(intake, 9))};
}

}  // namespace afflux::python
