// The classes _engine.Ledger and _engine.Mutex.
#include <pybind11/stl.h>

#include "descriptors.hpp"
#include "ledger.hpp"

namespace py = pybind11;

namespace afflux::python {

namespace {

void bind_mutex(py::module_& module) {
  py::class_<Mutex> type(module, "Mutex", py::is_final(), py::module_local());
  type.def(py::init<>());
  add_method<&Mutex::lock>(type, "__enter__");
  add_method<&Mutex::exit>(type, "__exit__");
  add_method<&Mutex::acquire>(type, "acquire");
  add_method<&Mutex::unlock>(type, "release");
  add_method<&Mutex::is_held>(type, "locked");
  add_attribute<&Mutex::owner>(type, "owner");
  add_attribute<&Mutex::is_mine>(type, "is_mine");
  add_attribute<&Mutex::handed_out, &Mutex::set_handed_out>(type, "handed_out");
  add_attribute<&Mutex::driver, &Mutex::set_driver>(type, "driver");
  add_attribute<&Mutex::awaited, &Mutex::set_awaited>(type, "awaited");
  add_attribute<&Mutex::fork, &Mutex::set_fork>(type, "fork");
}

// Returns whether a ledger's constructor has ended. The collector also comes between the allocation of an object and
// that of pybind11's fields in it, which are zeros until then; is_holder_constructed would read through one of them.
bool is_made(PyObject* self) {
  const auto* const fields = reinterpret_cast<const py::detail::instance*>(self);
  return (fields->simple_layout || fields->nonsimple.status != nullptr) && py::detail::is_holder_constructed(self);
}

}  // namespace

void bind_ledger(py::module_& module) {
  texts = new Texts();
  bind_mutex(module);
  const py::custom_type_setup collected([](PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
      Py_VISIT(Py_TYPE(self));
      return is_made(self) ? self_of<Ledger>(self).traverse(visit, arg) : 0;
    };
    type.tp_clear = [](PyObject* self) -> int {
      if (is_made(self)) self_of<Ledger>(self).clear();
      return 0;
    };
  });
  py::class_<Ledger> type(module, "Ledger", py::module_local(), collected);
  type.def(py::init<const py::tuple&, const std::string&, std::optional<std::int64_t>, std::optional<double>, bool,
                    bool, bool, bool, std::int64_t>(),
           py::arg("classes"), py::arg("duplicates"), py::arg("max_staleness"), py::arg("flush_after"),
           py::arg("by_flush"), py::arg("log"), py::arg("reporting"), py::arg("accumulates"), py::arg("max_bases"));
  type.def(py::init<Ledger&>(), py::arg("begun"), py::keep_alive<1, 2>());
  add_method<&Ledger::push>(type, "push");
  add_method<&Ledger::take_all>(type, "take_all");
  add_method<&Ledger::join>(type, "join");
  add_method<&Ledger::join_all>(type, "join_all");
  add_method<&Ledger::decide>(type, "decide");
  add_method<&Ledger::record>(type, "record");
  add_method<&Ledger::count_push>(type, "count_push");
  add_method<&Ledger::cut>(type, "cut_buffer");
  add_method<&Ledger::adopt>(type, "adopt");
  add_method<&Ledger::commit>(type, "commit");
  add_method<&Ledger::abandon_round>(type, "abandon_round");
  add_method<&Ledger::load>(type, "load");
  add_method<&Ledger::hand_in>(type, "set_rule_vectors");
  add_method<&Ledger::set_params>(type, "set_version");
  add_method<&Ledger::replace_rule>(type, "set_rule");
  add_method<&Ledger::next_report>(type, "next_report");
  add_method<&Ledger::attach>(type, "attach");
  add_method<&Ledger::take_vectors>(type, "take_vectors");
  add_method<&Ledger::use_slots>(type, "use_slots");
  add_method<&Ledger::replay>(type, "set_replay");
  add_method<&Ledger::close>(type, "close");
  add_method<&Ledger::open_task>(type, "open_task");
  add_method<&Ledger::restore_task>(type, "restore_task");
  add_method<&Ledger::close_task>(type, "close_task");
  add_method<&Ledger::compact_task_events>(type, "compact_task_events");
  add_method<&Ledger::is_open>(type, "is_open");
  add_method<&Ledger::opened>(type, "opened");
  add_method<&Ledger::opened_tasks>(type, "opened_tasks");
  add_method<&Ledger::next_overdue>(type, "next_overdue");
  add_method<&Ledger::base>(type, "base");
  add_method<&Ledger::base_of>(type, "base_of");
  add_method<&Ledger::bases>(type, "bases");
  add_method<&Ledger::take_base>(type, "take_base");
  add_method<&Ledger::put_back_base>(type, "put_back_base");
  add_method<&Ledger::arrivals>(type, "arrivals");
  add_method<&Ledger::blocks>(type, "blocks");
  add_attribute<static_cast<py::object (Ledger::*)() const>(&Ledger::snapshot)>(type, "state");
  add_attribute<&Ledger::decided_snapshot>(type, "decided_state");
  add_attribute<&Ledger::has_room>(type, "has_room");
  add_attribute<&Ledger::mutex>(type, "mutex");
  add_attribute<&Ledger::current>(type, "current");
  add_attribute<&Ledger::version>(type, "version");
  add_attribute<&Ledger::decided_version>(type, "decided_version");
  add_attribute<&Ledger::rule>(type, "rule");
  add_attribute<&Ledger::next_rule>(type, "next_rule");
  add_attribute<&Ledger::rows>(type, "rows");
  add_attribute<&Ledger::filled>(type, "filled");
  add_attribute<&Ledger::round_size>(type, "round_size");
  add_attribute<&Ledger::last_slot>(type, "last_slot");
  add_attribute<&Ledger::round>(type, "round");
  add_attribute<&Ledger::number>(type, "number");
  add_attribute<&Ledger::counts>(type, "counts");
  add_attribute<&Ledger::counts_since_round>(type, "counts_since_round");
  add_attribute<&Ledger::rounds_counted>(type, "rounds_counted");
  add_attribute<&Ledger::growing_log>(type, "growing_log");
  add_attribute<&Ledger::rule_vectors>(type, "rule_vectors");
  add_attribute<&Ledger::handed>(type, "handed");
  add_attribute<&Ledger::scalars>(type, "scalars");
  add_attribute<&Ledger::norms>(type, "norms");
  add_attribute<&Ledger::in_passes>(type, "in_passes");
  add_attribute<&Ledger::left_in_pass>(type, "left_in_pass");
  add_attribute<&Ledger::pass_clients>(type, "pass_clients");
  add_attribute<&Ledger::entered>(type, "entered");
  add_attribute<&Ledger::late>(type, "late");
  add_attribute<&Ledger::replaying>(type, "replaying");
  add_attribute<&Ledger::by_flush>(type, "by_flush");
  add_attribute<&Ledger::max_staleness>(type, "max_staleness");
  add_attribute<&Ledger::unreported>(type, "unreported");
  add_attribute<&Ledger::faults>(type, "faults");
  add_attribute<&Ledger::closed>(type, "closed");
  add_attribute<&Ledger::failure>(type, "failure");
  add_attribute<&Ledger::task_count>(type, "task_count");
  add_attribute<&Ledger::next_deadline>(type, "next_deadline");
  add_attribute<&Ledger::has_overdue_task>(type, "has_overdue_task");
  module.def("clock", now);
  module.def("set_clock", [](std::optional<double> seconds) { fixed_time = seconds; }, py::arg("seconds"));
}

}  // namespace afflux::python
