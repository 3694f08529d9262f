// Slots of vectors by number. A slot is free, taken by a call, or joined: that of an arrival.
#pragma once
#include <cstdint>
#include <vector>

namespace afflux::control {

class Slots {
 public:
  explicit Slots(std::int64_t count) : states_(static_cast<std::size_t>(count), free) {
    for (std::int64_t slot = count; slot-- > 0;) free_.push_back(slot);
  }
  // Returns a slot that was free; -1: all are in use.
  std::int64_t take() noexcept {
    if (free_.empty()) return -1;
    const std::int64_t slot = free_.back();
    free_.pop_back();
    state(slot) = taken;
    return slot;
  }
  // The slot of a call is that of an arrival now.
  void join(std::int64_t slot) noexcept { change(slot, taken, joined); }
  // Ends a call's use of a slot, unless an arrival has it now; may be repeated.
  void give_back(std::int64_t slot) noexcept { change(slot, taken, free); }
  // Ends an arrival's use of a slot.
  void release(std::int64_t slot) noexcept { change(slot, joined, free); }

  std::int64_t size() const { return static_cast<std::int64_t>(states_.size()); }
  std::int64_t in_use() const { return size() - static_cast<std::int64_t>(free_.size()); }

 private:
  enum State : std::uint8_t { free, taken, joined };
  State& state(std::int64_t slot) { return states_[static_cast<std::size_t>(slot)]; }
  void change(std::int64_t slot, State from, State to) noexcept {
    if (slot < 0 || slot >= size() || state(slot) != from) return;
    state(slot) = to;
    if (to == free) free_.push_back(slot);  // the constructor has made room for all
  }

  std::vector<State> states_;
  std::vector<std::int64_t> free_;
};

}  // namespace afflux::control
