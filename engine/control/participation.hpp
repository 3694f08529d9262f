// Gradient scheduling: the clients that have entered in the current pass over all clients.
#pragma once
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "control/buffer.hpp"
#include "control/clients.hpp"

namespace afflux::control {

class Participation {
 public:
  explicit Participation(std::int64_t num_clients) : num_clients_(num_clients) {}
  // A draft's pass: in addition to the clients of `begun`, which must not change meanwhile.
  static Participation draft(const Participation& begun) {
    Participation pass(begun.num_clients_);
    pass.begun_ = &begun;
    return pass;
  }

  std::int64_t num_clients() const { return num_clients_; }
  std::int64_t entered() const {
    return static_cast<std::int64_t>(order_.size()) + (begun_ == nullptr ? 0 : begun_->entered());
  }
  std::int64_t left() const { return num_clients_ - entered(); }
  bool has(const Client& client) const {
    return client && (members_.count(client.number()) != 0 || (begun_ != nullptr && begun_->has(client)));
  }
  const std::vector<Client>& order() const { return order_; }  // as they entered: those in the buffer are last
  bool extends(const Participation& begun) const { return begun_ == &begun; }

  // The client must not have entered before. An exception changes nothing.
  void enter(const Client& client) {
    make_room(order_, 1);
    members_.insert(client.number());
    order_.push_back(client);
  }
  // The last `count` clients have not entered.
  void leave(std::int64_t count) noexcept {
    for (; count > 0; --count) {
      members_.erase(order_.back().number());
      order_.pop_back();
    }
  }
  // Makes room for `append`.
  void reserve(const Participation& draft) {
    make_room(order_, draft.order_.size());
    members_.reserve(members_.size() + draft.members_.size());
  }
  // The clients of a draft have entered here.
  void append(Participation&& draft) noexcept {
    for (Client& client : draft.order_) order_.push_back(std::move(client));
    members_.merge(draft.members_);
  }

 private:
  std::int64_t num_clients_;
  std::vector<Client> order_;
  std::unordered_set<std::int64_t> members_;  // numbers of the clients of `order_`
  const Participation* begun_ = nullptr;
};

}  // namespace afflux::control
