// The buffer: arrivals that wait for their round, and which of them is a client's.
#pragma once
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/push.hpp"

namespace afflux::control {

// Makes room for `more` elements, so that adding them cannot fail.
template <class T>
void make_room(std::vector<T>& list, std::size_t more) {
  if (list.capacity() - list.size() < more) list.reserve(std::max(list.size() + more, 2 * list.size() + 16));
}

// The canonical order of arrivals does not depend on when they came: by client, version and join.
inline bool precedes(const Arrival& a, const Arrival& b) {
  return std::tie(a.client.id(), a.version, a.join) < std::tie(b.client.id(), b.version, b.join);
}

class Buffer {
 public:
  // `by_client`: each client has at most one arrival, which `waiting` finds.
  explicit Buffer(bool by_client = false) : by_client_(by_client) {}

  const std::vector<Arrival>& arrivals() const { return arrivals_; }  // oldest first
  std::int64_t filled() const { return static_cast<std::int64_t>(arrivals_.size()); }
  bool empty() const { return arrivals_.empty(); }
  // Returns the arrival of a client; null: there is none.
  const Arrival* waiting(const Client& client) const {
    const auto place = client ? places_.find(client.number()) : places_.end();
    return place == places_.end() ? nullptr : &arrivals_[place->second];
  }
  std::vector<const Arrival*> canonical() const {
    std::vector<const Arrival*> order;
    for (const Arrival& arrival : arrivals_) order.push_back(&arrival);
    std::sort(order.begin(), order.end(), [](const Arrival* a, const Arrival* b) { return precedes(*a, *b); });
    return order;
  }

  // An exception changes nothing.
  void join(Arrival&& arrival) {
    make_room(arrivals_, 1);
    if (by_client_) places_.insert_or_assign(arrival.client.number(), arrivals_.size());
    arrivals_.push_back(std::move(arrival));
  }
  // Replaces the arrival of the same client, and returns it.
  Arrival replace(Arrival&& arrival) noexcept {
    return std::exchange(arrivals_[places_.find(arrival.client.number())->second], std::move(arrival));
  }
  // Empties the buffer. Returns its arrivals, oldest first.
  std::vector<Arrival> take() noexcept {
    std::vector<Arrival> all = std::move(arrivals_);
    arrivals_.clear();
    places_.clear();
    return all;
  }

 private:
  bool by_client_;
  std::vector<Arrival> arrivals_;
  std::unordered_map<std::int64_t, std::size_t> places_;  // by the number of the client
};

}  // namespace afflux::control
