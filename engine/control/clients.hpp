// Clients by number. A client has a number while a handle of it exists.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace afflux::control {

// An int of 64 bits, signed or unsigned, or a text in UTF-8. An unsigned one is used only beyond the signed ones, so
// that equal ids are equal. The order of ids is that of the variant: ints numerically, then texts by bytes, which is
// the order of their code points.
using Id = std::variant<std::int64_t, std::uint64_t, std::string>;
inline Id id_of(std::uint64_t number) {
  return number <= INT64_MAX ? Id(static_cast<std::int64_t>(number)) : Id(number);
}

// Not for several threads at once, and handles must not outlive it.
class Clients {
 private:
  struct Record {
    Clients* clients;
    std::int64_t number;
    std::int64_t references = 0;
    bool has_row = false;
    std::uint32_t rounds = 0;
  };
  using Node = std::pair<const Id, Record>;

 public:
  Clients() = default;
  Clients(const Clients&) = delete;
  Clients& operator=(const Clients&) = delete;

  // A handle of a client, or of none.
  class Client {
   public:
    Client() = default;
    Client(const Client& other) noexcept : node_(other.node_) {
      if (node_ != nullptr) ++node_->second.references;
    }
    Client(Client&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
    Client& operator=(Client other) noexcept {
      std::swap(node_, other.node_);
      return *this;
    }
    ~Client() {
      if (node_ != nullptr && --node_->second.references == 0) node_->second.clients->forget(*node_);
    }
    explicit operator bool() const { return node_ != nullptr; }
    const Id& id() const { return node_->first; }
    std::int64_t number() const { return node_->second.number; }
    bool has_row() const { return node_->second.has_row; }
    void set_row(bool has_row) const { node_->second.has_row = has_row; }
    // The rounds that the client was in, if they are counted.
    std::int64_t rounds() const { return node_->second.rounds; }
    void set_rounds(std::int64_t rounds) const { node_->second.rounds = static_cast<std::uint32_t>(rounds); }

   private:
    friend Clients;
    explicit Client(Node& node) noexcept : node_(&node) { ++node.second.references; }
    Node* node_ = nullptr;
  };

  // Returns the client with this id, which gets a number if it has none.
  Client of(const Id& id) {
    // Room for all numbers, so that none is lost when it becomes free.
    const bool is_new = free_.empty();
    if (is_new && free_.capacity() <= size()) free_.reserve(2 * size() + 8);
    const std::int64_t number = is_new ? static_cast<std::int64_t>(size()) : free_.back();
    const auto [place, is_added] = by_id_.try_emplace(id, Record{this, number});
    if (is_added && !is_new) free_.pop_back();
    return Client(*place);
  }
  // Returns the client if it has a number.
  Client find(const Id& id) {
    const auto place = by_id_.find(id);
    return place == by_id_.end() ? Client() : Client(*place);
  }
  // The number of clients that have one.
  std::size_t size() const { return by_id_.size(); }

 private:
  void forget(const Node& node) noexcept {
    free_.push_back(node.second.number);
    by_id_.erase(by_id_.find(node.first));
  }

  std::unordered_map<Id, Record> by_id_;
  std::vector<std::int64_t> free_;  // numbers below the largest one that was given
};
using Client = Clients::Client;

}  // namespace afflux::control
