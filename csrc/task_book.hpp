// The open tasks of a server: which client trains from which version, and the versions that they hold.
#pragma once
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "values.hpp"

namespace afflux::python {

// References that a decision drops. They are released after it, because that may run any code.
using Dropped = std::vector<pybind11::object>;

class TaskBook {
 public:
  // `most` versions are held at once.
  explicit TaskBook(std::int64_t most) : most_(most) {}

  std::int64_t size() const { return static_cast<std::int64_t>(open_.size()); }
  bool is_open(pybind11::handle id) const { return find(id) != nullptr; }
  // Returns the entry of the log that has opened the task; None if the task is not open.
  pybind11::object opened(pybind11::handle id) const {
    const Task* const task = find(id);
    return task == nullptr ? pybind11::none() : task->opened;
  }
  // Returns the entries of the log that have opened the tasks, oldest first.
  pybind11::list all_opened() const {
    pybind11::list entries;
    for (const auto& [_, task] : open_) entries.append(task.opened);
    return entries;
  }

  // Opens a task, which holds the version `base` unless that is None. An exception changes nothing.
  void open(pybind11::handle opened, pybind11::handle id, std::int64_t version, bool holds, double deadline,
            pybind11::handle base, Dropped& dropped) {
    if (!PyUnicode_CheckExact(id.ptr())) throw pybind11::type_error("[TaskBook] the id of a task is no str");
    const std::uint64_t number = next_;
    pybind11::object place = owned(PyLong_FromUnsignedLongLong(number));
    const auto borrowed = [](pybind11::handle object) {
      return pybind11::reinterpret_borrow<pybind11::object>(object);
    };
    const auto task = open_.emplace(number, Task{borrowed(opened), borrowed(id), version, holds, deadline}).first;
    try {
      if (deadline != HUGE_VAL) leases_.emplace(deadline, number);
      if (holds && !is_none(base)) {
        const auto held = bases_.try_emplace(version, Base{borrowed(base), {}}).first;
        held->second.holders.insert(number);
        if (held->second.holders.size() == 1) dropped.reserve(dropped.size() + bases_.size());
      }
      if (PyDict_SetItem(numbers_.ptr(), id.ptr(), place.ptr()) != 0) throw pybind11::error_already_set();
    } catch (...) {
      leases_.erase({deadline, number});
      leave(task->second.version, number, dropped);
      open_.erase(task);
      throw;
    }
    ++next_;
    while (static_cast<std::int64_t>(bases_.size()) > most_) release(bases_.begin(), dropped);
  }

  // Closes a task, if it is open.
  void close(pybind11::handle id, Dropped& dropped) {
    const Task* const task = find(id);
    if (task == nullptr) return;
    const auto place = open_.find(number_of(id));
    const std::uint64_t number = place->first;
    leases_.erase({task->deadline, number});
    leave(task->version, number, dropped);
    PyDict_DelItem(numbers_.ptr(), id.ptr());
    PyErr_Clear();
    dropped.push_back(std::move(place->second.opened));
    dropped.push_back(std::move(place->second.id));
    open_.erase(place);
  }

  // Closes all tasks.
  void clear(Dropped& dropped) {
    while (!open_.empty()) close(pybind11::object(open_.begin()->second.id), dropped);
    while (!bases_.empty()) release(bases_.begin(), dropped);
  }

  // Calls `visit` with each reference.
  template <class Visit>
  void for_each(const Visit& visit) const {
    visit(numbers_);
    for (const auto& [_, task] : open_) {
      visit(task.opened);
      visit(task.id);
    }
    for (const auto& [_, base] : bases_) visit(base.pulled);
  }

  // The earliest deadline, by the monotonic clock; infinite without a lease.
  double next_deadline() const { return leases_.empty() ? HUGE_VAL : leases_.begin()->first; }
  // Returns the id of the open task whose lease has ended first; None if no lease has ended.
  pybind11::object next_overdue(double now) const {
    return next_deadline() <= now ? open_.at(leases_.begin()->second).id : pybind11::none();
  }

  // Returns the version of this number that tasks hold; None if none does.
  pybind11::object base(std::int64_t version) const {
    const auto held = bases_.find(version);
    return held == bases_.end() ? pybind11::none() : held->second.pulled;
  }
  // Returns the version that a task holds; None if it holds none.
  pybind11::object base_of(pybind11::handle id) const {
    const Task* const task = find(id);
    return task == nullptr || !task->holds ? pybind11::none() : base(task->version);
  }
  pybind11::dict bases() const {
    pybind11::dict all;
    for (const auto& [version, base] : bases_)
      if (!is_none(base.pulled)) put(all, integer(version), base.pulled);
    return all;
  }
  // Returns the version of this number, and holds it no longer, until `put_back`.
  pybind11::object take(std::int64_t version) {
    const auto held = bases_.find(version);
    return held == bases_.end() ? pybind11::none() : std::exchange(held->second.pulled, pybind11::none());
  }
  // Holds the version for its tasks again; None: no longer.
  void put_back(std::int64_t version, pybind11::handle pulled) {
    const auto held = bases_.find(version);
    if (held == bases_.end()) return;
    if (is_none(pulled))
      bases_.erase(held);
    else
      held->second.pulled = pybind11::reinterpret_borrow<pybind11::object>(pulled);
  }
  // Releases the versions before `oldest`.
  void release_before(std::int64_t oldest, Dropped& dropped) {
    while (!bases_.empty() && bases_.begin()->first < oldest) release(bases_.begin(), dropped);
  }

 private:
  struct Task {
    pybind11::object opened, id;
    std::int64_t version;
    bool holds;
    double deadline;
  };
  struct Base {
    pybind11::object pulled;
    std::set<std::uint64_t> holders;  // tasks by number
  };

  std::uint64_t number_of(pybind11::handle id) const {
    return PyLong_AsUnsignedLongLong(PyDict_GetItemWithError(numbers_.ptr(), id.ptr()));
  }
  const Task* find(pybind11::handle id) const {
    // The hash of a subclass of str may be code of Python.
    if (!PyUnicode_CheckExact(id.ptr()) || PyDict_Contains(numbers_.ptr(), id.ptr()) != 1) return nullptr;
    return &open_.at(number_of(id));
  }
  void leave(std::int64_t version, std::uint64_t number, Dropped& dropped) {
    const auto held = bases_.find(version);
    if (held == bases_.end()) return;
    held->second.holders.erase(number);
    if (held->second.holders.empty()) release(held, dropped);
  }
  void release(std::map<std::int64_t, Base>::iterator held, Dropped& dropped) {
    dropped.push_back(std::move(held->second.pulled));
    bases_.erase(held);
  }

  const std::int64_t most_;
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, Task> open_;                 // by number, in the order of their opening
  pybind11::dict numbers_;                             // of the open tasks, by id
  std::set<std::pair<double, std::uint64_t>> leases_;  // deadlines of open tasks
  std::map<std::int64_t, Base> bases_;                 // by version
};

}  // namespace afflux::python
