#include "fast_push.hpp"

#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "afflux/afflux.hpp"
#include "attributes.hpp"
#include "buffers.hpp"
#include "forks.hpp"
#include "numpy_array.hpp"
#include "parts.hpp"
#include "release.hpp"
#include "server_objects.hpp"
#include "values.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// The facts of an arrival before it joins: the fields of aggregation.arrivals.Pushed.
enum Fact : std::size_t {
  kClient,
  kVersion,
  kExamples,
  kLoss,
  kNorm,
  kSlot,
  kBuffers,
  kExtremes,
  kLocalSteps,
  kOwnFacts,
  kFacts
};

struct Limits {
  double max_abs, max_norm;
  double most_squares;  // the largest sum of squares for which inner products cannot overflow
};

// The constants of all pushes of one server. It holds no reference to the server, which holds it.
class FastPush {
 public:
  FastPush(const py::tuple& classes, const std::string& kind, std::int64_t size, int num_threads, Limits limits,
           std::optional<std::int64_t> max_staleness, bool both_count)
      : server_state_(classes[0]),
        pending_arrival_(classes[1]),
        receipt_(classes[2]),
        log_entry_(classes[3]),
        closed_(classes[4]),
        client_error_(classes[5]),
        wanted_(kind == "update"     ? 0
                : kind == "gradient" ? 1
                                     : 2),
        size_(size),
        num_threads_(num_threads),
        limits_(limits),
        max_staleness_(max_staleness),
        both_count_(both_count) {}

  // Pushes a vector, see afflux/_engine.pyi.
  py::object push(py::handle aggregator, py::handle client, py::handle version, const std::array<py::handle, 3>& given,
                  py::handle num_examples, py::handle loss) const {
    for (std::size_t i = 0; i < given.size(); ++i)
      if (i != wanted_ && !is_none(given[i])) return py::none();
    py::object pushed = taken_in(aggregator, client, version, given[wanted_], num_examples, loss);
    if (is_none(pushed)) return pushed;
    py::object receipt = join(aggregator, pushed, py::none());
    return is_none(receipt) ? pushed : receipt;
  }

  py::object join(py::handle aggregator, py::handle pushed, py::handle ticket) const {
    const py::object admission = names->admission.of(aggregator);
    const py::object task = is_none(ticket) ? py::none() : names->task.of(ticket);
    if (!PyTuple_CheckExact(pushed.ptr()) || PyTuple_GET_SIZE(pushed.ptr()) != kFacts)
      throw py::type_error("[FastPush] pushed is no tuple of the facts of an arrival");
    PyObject* const* const facts = &PyTuple_GET_ITEM(pushed.ptr(), 0);
    py::object number, newest, late, tasks, decision;
    std::int64_t makes = 0;
    {
      const py::object monitor = names->monitor.of(aggregator);
      const Mutex mutex(monitor);
      if (!mutex.taken() || is_set(names->handed_out.of(monitor)) ||
          PyList_GET_SIZE(names->bells.of(monitor).ptr()) != 0 || !is_open(aggregator))
        return py::none();
      StateType::Values now(server_state_, names->state.of(admission));
      const std::int64_t filled = count(now[kFilled]);
      newest = names->version.of(now[kCurrent]);
      makes = count(newest) + !is_none(now[kRound]) + 1;
      const std::int64_t staleness = makes - 1 - count(facts[kVersion]);
      if (staleness < 0 || (max_staleness_ && staleness > *max_staleness_) || !is_none(now[kPasses]) ||
          filled + 1 >= count(names->buffer_size.of(now[kRule])) || !is_new(admission, now[kRows], facts[kClient]))
        return py::none();
      if (!is_none(task)) {
        tasks = names->tasks.of(aggregator);
        if (!is_set(names->is_open.call(tasks, task))) return py::none();
      }
      number = now[kNumber];
      late = integer(staleness);
      if (!is_none(ticket))
        decision = tuple_of<5>(reinterpret_cast<PyObject*>(&PyTuple_Type),
                               {names->joined, late, number, py::none(), py::none()});
      record(admission, now, facts, filled, late, task);
      // These come before any other call: if a signal handler raises an exception, the ticket must already show that
      // the arrival has joined.
      if (!is_none(ticket)) names->decision.set(ticket, decision);
      if (!is_none(task)) names->close.call(tasks, task);
    }
    const py::object storage = names->storage.of(aggregator), step = integer(makes);
    const py::object durable = is_none(storage) ? py::none() : names->next_durable_version.call(storage, step);
    return tuple_of<9>(receipt_,
                       {names->joined, late, newest, number, step, py::none(), names->empty, durable, names->nothing});
  }

 private:
  // Returns true if the server is not closed, and none of its steps has failed.
  static bool is_open(py::handle aggregator) {
    return !is_set(names->closed.of(aggregator)) && is_none(names->failure.of(aggregator));
  }

  // Makes the checks of `Aggregator.enter`. Returns false if one fails, or if a task has a lease, which may have ended.
  static bool may_enter(py::handle aggregator, py::handle state) {
    const py::object monitor = names->monitor.of(aggregator), making = names->round.of(state);
    if (PyLong_AsUnsignedLongLong(names->forks.of(monitor).ptr()) != forks || !is_open(aggregator) ||
        is_this_thread(names->owner.of(monitor)) || (!is_none(making) && is_this_thread(names->driver.of(making))))
      return false;
    return PyFloat_AsDouble(names->next_deadline.of(names->tasks.of(aggregator)).ptr()) == HUGE_VAL;
  }

  // Returns true if no arrival of the client waits, and the cached rows have room for the client.
  bool is_new(py::handle admission, py::handle rows, py::handle client) const {
    const int waits = both_count_ ? 0 : PyDict_Contains(names->places.of(admission).ptr(), client.ptr());
    if (waits < 0) throw py::error_already_set();
    if (waits != 0 || is_none(rows)) return waits == 0;
    PyObject* const arguments[] = {admission.ptr(), client.ptr(), rows.ptr()};
    PyObject* const found = PyObject_VectorcallMethod(names->check_clients.text(), arguments, 3, nullptr);
    Py_XDECREF(found);
    if (found == nullptr && PyErr_ExceptionMatches(client_error_.ptr()) == 0) throw py::error_already_set();
    PyErr_Clear();  // `Aggregator.join` raises it again
    return found != nullptr;
  }

  // Returns the memory of a plain NumPy vector of float32 or float64; nothing for any other object.
  std::optional<View<const void>> plain_vector(py::handle vector) const {
    const auto array = numpy_array(vector, false);
    if (!array || array->dimensions != 1 || array->shape[0] != size_) return {};
    return View<const void>{array->data, size_, {}, array->type};
  }

  // Returns a free slot or a new one, or null if all slots are taken.
  static std::unique_ptr<Buffer> free_slot(py::handle aggregator) {
    for (const py::handle each : names->pools.of(names->slots.of(aggregator))) {
      const auto pool = each.cast<std::shared_ptr<Pool>>();
      if (!pool->full()) return std::make_unique<Buffer>(pool);
    }
    return nullptr;
  }

  // Copies the vector of a push into a slot, and returns the facts of the push. Returns None for a push that is left to
  // Python.
  py::object taken_in(py::handle aggregator, py::handle client, py::handle version, py::handle vector,
                      py::handle num_examples, py::handle loss) const {
    const auto held = py::reinterpret_borrow<py::object>(vector);  // keeps it alive while other threads run
    const auto source = plain_vector(held);
    const std::optional<std::int64_t> pulled = plain_int(version), examples = plain_int(num_examples);
    if (!source || !is_plain_id(client) || !pulled || !examples || *examples < 1) return py::none();
    if (!is_none(loss) && (!PyFloat_CheckExact(loss.ptr()) || !std::isfinite(PyFloat_AS_DOUBLE(loss.ptr()))))
      return py::none();
    const py::object state = names->state.of(names->admission.of(aggregator));
    if (!may_enter(aggregator, state)) return py::none();
    const py::object rows = names->rows.of(state);
    const std::int64_t newest = count(names->version.of(names->current.of(state)));
    if (*pulled < 0 || *pulled > newest || (!is_none(rows) && is_set(names->reads_ahead.of(rows)))) return py::none();
    std::unique_ptr<Buffer> slot = free_slot(aggregator);
    if (!slot) return py::none();
    const Statistics found = ingested(*source, *slot);
    const double norm = std::sqrt(found.sum_of_squares);
    if (found.first_nonfinite >= 0 || -limits_.max_abs > found.min || found.max > limits_.max_abs ||
        norm > limits_.max_norm || found.sum_of_squares > limits_.most_squares)
      return py::none();
    const py::object own = py::cast(std::move(slot));
    const py::handle known_loss = is_none(loss) ? py::handle(names->nan) : loss;
    const py::object low = real(found.min), high = real(found.max);
    const py::object extremes = owned(PyTuple_Pack(2, low.ptr(), high.ptr()));
    return tuple_of<kFacts>(
        reinterpret_cast<PyObject*>(&PyTuple_Type),
        {client, version, num_examples, known_loss, real(norm), own, py::none(), extremes, names->zero, names->empty});
  }

  Statistics ingested(View<const void> source, const Buffer& slot) const {
    const auto sweep = [&] { return ingest(source, slot.view(), num_threads_, nullptr, slot.until_read()); };
    constexpr std::int64_t kShort = 4096;  // elements; the copy takes less time than releasing the GIL and taking it
    if (size_ <= kShort) return sweep();
    const GilRelease release;
    return sweep();
  }

  // Does the work of `Admission.record` for an arrival that joins. One assignment replaces the state.
  void record(py::handle admission, StateType::Values& now, PyObject* const* facts, std::int64_t filled,
              py::handle late, py::handle task) const {
    const py::object number = now[kNumber], log = names->log.of(admission);
    const py::object arrival =
        tuple_of<13>(pending_arrival_, {facts[kClient], facts[kVersion], facts[kExamples], facts[kLoss], facts[kNorm],
                                        facts[kSlot], facts[kBuffers], facts[kExtremes], facts[kLocalSteps],
                                        facts[kOwnFacts], number, late, py::none()});
    const py::object closed = is_none(task) ? py::none() : closed_by_push(now, task);
    if (!is_none(log)) {
      const py::bool_ lent(is_lent(facts[kSlot]));
      const std::int64_t logged = count(now[kLogged]);
      put(log, logged,
          tuple_of<10>(log_entry_, {number, names->joined, facts[kClient], facts[kVersion], late, facts[kExamples],
                                    facts[kLoss], lent, facts[kLocalSteps], facts[kOwnFacts]}));
      if (!is_none(closed)) put(log, logged + 1, closed);
      now[kLogged] = integer(logged + 1 + !is_none(closed));
    }
    if (!is_none(closed)) {
      const std::int64_t events = count(now[kTaskEvents]);
      put(names->task_events.of(admission), events, closed);
      now[kTaskEvents] = integer(events + 1);
    }
    if (filled == 0) {
      const auto since = std::chrono::steady_clock::now().time_since_epoch();
      now[kSince] = real(std::chrono::duration<double>(since).count());
    }
    if (!both_count_) put(names->places.of(admission), facts[kClient], now[kFilled]);
    put(now[kWaiting], filled, arrival);
    now[kFilled] = integer(filled + 1);
    now[kNumber] = integer(count(number) + 1);
    now[kCounts] = owned(PyDict_Copy(now[kCounts].ptr()));
    put(now[kCounts], names->joined, integer(count(PyDict_GetItem(now[kCounts].ptr(), names->joined.ptr())) + 1));
    names->state.set(admission, now.state());
  }

  // Returns the event that a push has closed its task.
  py::object closed_by_push(StateType::Values& now, py::handle task) const {
    now[kClosedTask] = names->task.of(names->opened.of(task));
    PyObject* const arguments[] = {now[kClosedTask].ptr(), names->pushed.ptr()};
    return owned(PyObject_Vectorcall(closed_.ptr(), arguments, 2, nullptr));
  }

  const StateType server_state_;
  const py::object pending_arrival_, receipt_, log_entry_, closed_, client_error_;
  const std::size_t wanted_;  // which of update, gradient and model the rule takes
  const std::int64_t size_;
  const int num_threads_;
  const Limits limits_;
  const std::optional<std::int64_t> max_staleness_;
  const bool both_count_;
};

// Calls a method of FastPush with N arguments, without pybind11's dispatcher, which takes a tenth of the time of a
// push.
template <std::size_t N, class Call>
PyObject* method(PyObject* self, Py_ssize_t given, const Call& call) {
  if (given != static_cast<Py_ssize_t>(N)) {
    PyErr_Format(PyExc_TypeError, "takes %d arguments, %zd were given", static_cast<int>(N), given);
    return nullptr;
  }
  try {
    return call(py::handle(self).cast<const FastPush&>()).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* push(PyObject* self, PyObject* const* a, Py_ssize_t given) {
  return method<8>(self, given,
                   [a](const FastPush& fast) { return fast.push(a[0], a[1], a[2], {a[3], a[4], a[5]}, a[6], a[7]); });
}

PyObject* join(PyObject* self, PyObject* const* a, Py_ssize_t given) {
  return method<3>(self, given, [a](const FastPush& fast) { return fast.join(a[0], a[1], a[2]); });
}

template <auto function>
void add_method(py::handle type, const char* name) {
  static PyMethodDef definition{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
                                METH_FASTCALL, nullptr};
  type.attr(name) = owned(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition));
}

}  // namespace

void bind_fast_push(py::module_& module) {
  names = new Names();
  const auto make = [](const py::tuple& classes, const std::string& kind, std::int64_t size, int num_threads,
                       double max_abs, double max_norm, double most_squares, std::optional<std::int64_t> max_staleness,
                       bool both_count) {
    return std::make_unique<FastPush>(classes, kind, size, num_threads, Limits{max_abs, max_norm, most_squares},
                                      max_staleness, both_count);
  };
  py::class_<FastPush> type(module, "FastPush", py::is_final(), py::module_local());
  type.def(py::init(make), py::arg("classes"), py::arg("kind"), py::arg("size"), py::arg("num_threads"),
           py::arg("max_abs"), py::arg("max_norm"), py::arg("most_squares"), py::arg("max_staleness"),
           py::arg("both_count"));
  add_method<push>(type, "push");
  add_method<join>(type, "join");
}

}  // namespace afflux::python
