// The pushes of plain vectors: the check of the arguments, the sweep that copies the vector, and the join.
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "afflux/afflux.hpp"
#include "ledger.hpp"
#include "numpy_array.hpp"
#include "release.hpp"

namespace py = pybind11;

namespace afflux::python {

bool Ledger::may_take_in() const {
  return intake_ && lock_->may_enter() && !closed_ && is_none(failure_) && tasks_.next_deadline() == HUGE_VAL &&
         !now_.rows.reads_ahead;
}

// Copies the vector of a push into a slot, and returns the facts of the push. Returns None for a push that is left to
// Python.
py::object Ledger::taken_in(py::handle client, py::handle version, py::handle vector, py::handle num_examples,
                            py::handle loss) const {
  const auto array = numpy_array(vector, false);
  const std::optional<std::int64_t> pulled = plain_int(version), examples = plain_int(num_examples);
  if (!array || array->dimensions != 1 || array->shape[0] != intake_->size || !is_plain_id(client) || !pulled ||
      !examples || *examples < 1 || *pulled < 0 || *pulled > now_.version)
    return py::none();
  if (!is_none(loss) && (!PyFloat_CheckExact(loss.ptr()) || !std::isfinite(PyFloat_AS_DOUBLE(loss.ptr()))))
    return py::none();
  std::unique_ptr<Buffer> slot;
  for (const py::handle each : intake_->pools) {
    if (const auto pool = each.cast<std::shared_ptr<Pool>>(); !pool->full()) {
      slot = std::make_unique<Buffer>(pool);
      break;
    }
  }
  if (!slot) return py::none();
  const py::object vector_held = held(vector);  // while other threads run
  const View<const void> source{array->data, intake_->size, {}, array->type};
  const double max_abs = intake_->max_abs, max_norm = intake_->max_norm, most_squares = intake_->most_squares;
  const auto sweep = [&, threads = intake_->num_threads] {
    return ingest(source, slot->view(), threads, nullptr, slot->until_read());
  };
  constexpr std::int64_t kShort = 4096;  // elements; the copy takes less time than releasing the GIL and taking it
  Statistics statistics;
  if (source.size <= kShort) {
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
  return tuple_of<kFacts>(reinterpret_cast<PyObject*>(&PyTuple_Type),
                          {client, version, num_examples, is_none(loss) ? py::handle(texts->nan) : loss, real(norm),
                           buffer, py::none(), extremes, texts->zero, texts->empty});
}

py::object Ledger::push(py::handle client, py::handle version, py::handle update, py::handle gradient, py::handle model,
                        py::handle num_examples, py::handle loss) {
  if (!may_take_in()) return py::none();
  const std::array<py::handle, 3> vectors{update, gradient, model};
  for (std::size_t i = 0; i < vectors.size(); ++i)
    if (i != intake_->wanted && !is_none(vectors[i])) return py::none();
  py::object pushed = taken_in(client, version, vectors[intake_->wanted], num_examples, loss);
  if (is_none(pushed)) return pushed;
  py::object receipt = join(pushed, py::none(), py::none(), py::none());
  return is_none(receipt) ? pushed : receipt;
}

void Ledger::take_vectors(py::handle intake) {
  check_tuple(intake, 7, "an intake");
  const auto kind = item(intake, 0).cast<std::string>();
  intake_ = Intake{kind == "update"     ? std::size_t{0}
                   : kind == "gradient" ? std::size_t{1}
                                        : std::size_t{2},
                   count_of(item(intake, 1)),
                   item(intake, 2).cast<int>(),
                   item(intake, 3).cast<double>(),
                   item(intake, 4).cast<double>(),
                   item(intake, 5).cast<double>(),
                   py::tuple(pools_of(item(intake, 6)))};
}

}  // namespace afflux::python
