// The open tasks: which client trains from which version until when, and the versions that they hold.
#pragma once
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/buffer.hpp"
#include "control/log.hpp"

namespace afflux::control {

class Tasks {
 public:
  struct Task {
    Opened opened;
    double deadline;  // of its lease, by the caller's monotonic clock; infinite: none
  };

  // At most `max_bases` versions are held at once: the oldest ones are released.
  explicit Tasks(std::int64_t max_bases) : max_bases_(max_bases) {}

  std::int64_t size() const { return static_cast<std::int64_t>(open_.size()); }
  const std::map<TaskNumber, Task>& open() const { return open_; }  // oldest first
  // Returns the task if it is open; else null.
  const Task* find(TaskNumber number) const {
    const auto place = open_.find(number);
    return place == open_.end() ? nullptr : &place->second;
  }
  std::optional<TaskNumber> number_of(const std::string& id) const {
    const auto place = numbers_.find(id);
    return place == numbers_.end() ? std::nullopt : std::optional(place->second);
  }
  // The earliest end of a lease; infinite without one.
  double next_deadline() const { return leases_.empty() ? HUGE_VAL : leases_.begin()->first; }
  // Returns an open task whose lease has ended, the one that has ended first.
  std::optional<TaskNumber> next_overdue(double now) const {
    if (next_deadline() > now || leases_.empty()) return std::nullopt;
    return leases_.begin()->second;
  }
  bool holds(std::int64_t version) const { return bases_.count(version) != 0; }
  std::size_t bases() const { return bases_.size(); }

  // Opens a task with an id that no open task has. An exception changes nothing.
  TaskNumber open(Task task) {
    const TaskNumber number = next_;
    const std::int64_t version = task.opened.version;
    const double deadline = task.deadline;
    // Every base is released once, without an allocation.
    make_room(released_, bases_.size() + 1);
    const auto name = numbers_.emplace(task.opened.task, number).first;
    try {
      if (deadline != HUGE_VAL) leases_.emplace(deadline, number);
      if (task.opened.hold) bases_[version].insert(number);
      open_.emplace(number, std::move(task));
    } catch (...) {
      leases_.erase({deadline, number});
      if (const auto base = bases_.find(version); base != bases_.end()) {
        base->second.erase(number);
        if (base->second.empty()) bases_.erase(base);  // it was not held before
      }
      numbers_.erase(name);
      throw;
    }
    ++next_;
    while (static_cast<std::int64_t>(bases_.size()) > max_bases_) release(bases_.begin());
    return number;
  }
  // Closes a task, if it is open.
  void close(TaskNumber number) noexcept {
    const auto place = open_.find(number);
    if (place == open_.end()) return;
    leases_.erase({place->second.deadline, number});
    leave(place->second.opened.version, number);
    numbers_.erase(numbers_.find(place->second.opened.task));
    open_.erase(place);
  }
  void clear() noexcept {
    while (!open_.empty()) close(open_.begin()->first);
  }
  // Releases a version, if it is held.
  void release(std::int64_t version) noexcept {
    if (const auto base = bases_.find(version); base != bases_.end()) release(base);
  }
  // Releases the versions before `oldest`.
  void release_before(std::int64_t oldest) noexcept {
    while (!bases_.empty() && bases_.begin()->first < oldest) release(bases_.begin());
  }
  // Calls visit(version) for each version that was released since the last call.
  template <class Visit>
  void take_released(const Visit& visit) noexcept {
    for (const std::int64_t version : released_) visit(version);
    released_.clear();
  }

 private:
  using Bases = std::map<std::int64_t, std::set<TaskNumber>>;  // by version: the tasks that hold it

  void leave(std::int64_t version, TaskNumber number) noexcept {
    const auto base = bases_.find(version);
    if (base == bases_.end()) return;
    base->second.erase(number);
    if (base->second.empty()) release(base);
  }
  void release(Bases::iterator base) noexcept {
    released_.push_back(base->first);
    bases_.erase(base);
  }

  std::int64_t max_bases_;
  TaskNumber next_ = 0;
  std::map<TaskNumber, Task> open_;
  std::unordered_map<std::string, TaskNumber> numbers_;
  std::set<std::pair<double, TaskNumber>> leases_;
  Bases bases_;
  std::vector<std::int64_t> released_;
};

}  // namespace afflux::control
