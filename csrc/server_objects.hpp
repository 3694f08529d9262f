// The objects of a server that a push reads and replaces: attributes by name, the mutex, and the state.
#pragma once
#include <pybind11/pybind11.h>
#include <pythread.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "afflux/afflux.hpp"
#include "attributes.hpp"

namespace afflux::python {
namespace {

struct Names {
  // The attributes of the Aggregator and its parts.
  Name admission{"admission"}, monitor{"_monitor"}, slots{"slots"}, tasks{"tasks"}, storage{"storage"},
      closed{"closed"}, failure{"failure"}, next_deadline{"next_deadline"}, pools{"_pools"},
      next_durable_version{"next_durable_version"};
  // The attributes of the Monitor and its mutex.
  Name mutex{"_mutex"}, owner{"owner"}, forks{"forks"}, bells{"_bells"}, handed_out{"_handed_out"}, acquire{"acquire"},
      release{"release"};
  // The attributes of the Admission, its state, and the objects in the state.
  Name state{"state"}, places{"_places"}, log{"_log"}, check_clients{"_check_clients"}, current{"current"},
      rows{"rows"}, round{"round"}, version{"version"}, driver{"driver"}, buffer_size{"buffer_size"},
      reads_ahead{"reads_ahead"}, task_events{"_task_events"};
  // The attributes of the TaskBook, an OpenTask and a Ticket.
  Name is_open{"is_open"}, close{"close"}, opened{"opened"}, task{"task"}, decision{"decision"};
  pybind11::str joined{"joined"}, nothing{""}, pushed{"pushed"};
  pybind11::tuple empty;  // no reports, and no facts
  pybind11::int_ zero{0};
  pybind11::object nan =
      pybind11::module_::import("math").attr("nan");  // the same object each time: entries of logs are compared
};
const Names* names = nullptr;  // created with the module, never freed

// The fields of a ServerState that are read or replaced here; all others do not change.
enum Field : std::size_t {
  kCurrent,
  kRule,
  kRows,
  kWaiting,
  kFilled,
  kRound,
  kNumber,
  kCounts,
  kLogged,
  kTaskEvents,
  kClosedTask,
  kPasses,
  kSince
};
constexpr std::array<const char*, 13> kFields = {"current",     "rule",   "rows",   "waiting", "filled",
                                                 "round",       "number", "counts", "logged",  "task_events",
                                                 "closed_task", "passes", "since"};

// A lock of a Monitor's mutex, which is taken only if the mutex is free. Sets the Monitor's owner.
class Mutex {
 public:
  explicit Mutex(pybind11::handle monitor) : monitor_(monitor), lock_(names->mutex.of(monitor)) {
    const pybind11::object thread = owned(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
    taken_ = names->acquire.call(lock_, Py_False).ptr() == Py_True;
    if (taken_) names->owner.set(monitor_, thread);
  }
  ~Mutex() {
    if (!taken_) return;
    const pybind11::error_scope error;  // keeps an exception that is being raised
    PyObject_SetAttr(monitor_.ptr(), names->owner.text(), Py_None);
    Py_XDECREF(PyObject_CallMethodNoArgs(lock_.ptr(), names->release.text()));
  }
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  bool taken() const { return taken_; }

 private:
  const pybind11::handle monitor_;
  const pybind11::object lock_;
  bool taken_ = false;
};

// The class ServerState, whose fields are copied from one state to the next.
class StateType {
  static constexpr std::size_t kMost = 24;

 public:
  explicit StateType(pybind11::object type) : type_(std::move(type)) {
    for (const pybind11::handle field : type_.attr("__struct_fields__")) {
      const auto name = field.cast<std::string>();
      for (std::size_t known = 0; known < kFields.size(); ++known)
        if (name == kFields[known]) places_[known] = names_.size();
      names_.emplace_back(name.c_str());
    }
    if (names_.size() > kMost) throw Error("[FastPush] ServerState has more than " + std::to_string(kMost) + " fields");
  }

  // The values of a state.
  class Values {
   public:
    Values(const StateType& type, pybind11::handle state) : type_(type) {
      for (std::size_t i = 0; i < type.names_.size(); ++i) values_[i] = type.names_[i].of(state);
    }
    pybind11::object& operator[](Field field) { return values_[type_.places_[field]]; }
    // Returns a new state with these values.
    pybind11::object state() const {
      std::array<PyObject*, kMost> items;
      for (std::size_t i = 0; i < type_.names_.size(); ++i) items[i] = values_[i].ptr();
      return owned(PyObject_Vectorcall(type_.type_.ptr(), items.data(), type_.names_.size(), nullptr));
    }

   private:
    const StateType& type_;
    std::array<pybind11::object, kMost> values_;
  };

 private:
  const pybind11::object type_;
  std::vector<Name> names_;
  std::array<std::size_t, kFields.size()> places_{};
};

}  // namespace
}  // namespace afflux::python
