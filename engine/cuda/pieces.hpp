// The way of a vector from the host to the device: in pieces of pinned memory. While the device reads one piece, the
// host fills the next.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "afflux/order.hpp"
#include "api/kernels.hpp"
#include "cpu/parallel_for.hpp"

namespace afflux::cuda {

constexpr std::int64_t kPieceBytes = std::int64_t{1} << 21;  // of pinned memory, and as many of the device
constexpr std::size_t kMostPieces = 12;                      // of a device: four calls at once run at full speed

// The pieces of one device that no call uses. They are kept for later calls. Thread-safe.
template <class Piece>
class PieceStore {
 public:
  static PieceStore& of(std::int32_t device) {
    static std::mutex mutex;
    static auto* const stores =
        new std::map<std::int32_t, PieceStore>;  // never deleted: the driver may end before static objects do
    const std::lock_guard<std::mutex> lock(mutex);
    return stores->try_emplace(device).first->second;
  }
  // Returns a piece. If all are in use, it waits for one; if it may not wait, it returns null then, or without memory
  // for another piece.
  std::unique_ptr<Piece> take(bool may_wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (may_wait) freed_.wait(lock, [&] { return !free_.empty() || count_ < Piece::kMost; });
    if (free_.empty() && count_ == Piece::kMost) return nullptr;
    if (free_.empty()) try {
        free_.reserve(count_ + 1);  // so that give_back never allocates
        auto piece = std::make_unique<Piece>();
        ++count_;
        return piece;
      } catch (const std::bad_alloc&) {
        if (may_wait) throw;
        return nullptr;
      }
    auto piece = std::move(free_.back());
    free_.pop_back();
    return piece;
  }
  void give_back(std::unique_ptr<Piece> piece) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(piece));
    freed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<std::unique_ptr<Piece>> free_;
  std::size_t count_ = 0;
};

// The pieces of one call, used in turns.
template <class Executor>
class Ring {
 public:
  using Piece = typename Executor::Piece;

  Ring(Executor& executor, std::int32_t device) : executor_(executor), store_(PieceStore<Piece>::of(device)) {
    pieces_.reserve(kMost);
  }
  // After an error, copies from the caller's memory and kernels that read the pieces may still be in progress.
  ~Ring() {
    for (auto& piece : pieces_) {
      try {
        if (std::uncaught_exceptions() > 0) executor_.mark(*piece);
        executor_.wait(*piece);
      } catch (...) {  // the device has failed; the next call says so
      }
      store_.give_back(std::move(piece));
    }
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Returns a piece that the device has read.
  Piece& next() {
    if (pieces_.size() < kMost)
      if (auto piece = store_.take(pieces_.empty())) {
        pieces_.push_back(std::move(piece));
        return *pieces_.back();
      }
    Piece& piece = *pieces_[next_];
    next_ = (next_ + 1) % pieces_.size();
    executor_.wait(piece);
    return piece;
  }

 private:
  static constexpr std::size_t kMost = 3;
  Executor& executor_;
  PieceStore<Piece>& store_;
  std::vector<std::unique_ptr<Piece>> pieces_;
  std::size_t next_ = 0;
};

// What a piece holds of an update: whole superblocks. Neighbours of one type lie side by side, as one part, and so that
// blocks of the order begin at aligned addresses. The list of the parts follows, if there are several.
class Cargo {
 public:
  struct Copy {
    const unsigned char* from;
    std::int64_t to, bytes;
  };

  // The parts of the update, as for Backend::ingest.
  explicit Cargo(const Part* parts) : part_(parts) {}

  // Replaces the content by the superblocks from `begin` on that fit into a piece, but at least one. Returns their end.
  std::int64_t load(std::int64_t begin, std::int64_t size) {
    copies_.clear();
    runs_.clear();
    bytes_ = 0;
    while (begin < size) {
      const std::size_t copies = copies_.size(), runs = runs_.size();
      const std::int64_t bytes = bytes_, end = std::min(begin + kSuperblock, size);
      const Part* const part = part_;
      add(begin, end);
      if (copies > 0 && total() > kPieceBytes) {
        copies_.resize(copies);
        runs_.resize(runs);
        bytes_ = bytes, part_ = part;
        break;
      }
      begin = end;
    }
    return begin;
  }
  const std::vector<Copy>& copies() const { return copies_; }
  std::int64_t parts() const { return static_cast<std::int64_t>(runs_.size()); }
  // Returns the offset of the list.
  std::int64_t list() const { return aligned(bytes_); }
  // Returns the bytes of all.
  std::int64_t total() const { return parts() > 1 ? list() + (parts() + 1) * kPartBytes : bytes_; }
  // Returns the first part of a piece that is at this address of the device.
  Part first_part(const unsigned char* piece) const { return part_of(runs_.front(), piece); }
  // Writes the list of such a piece; `end` is the end of the last part.
  void write_list(std::int64_t end, const unsigned char* piece, unsigned char* to) const {
    const auto write = [&](const Part& part) {
      std::memcpy(to, &part, sizeof part);
      to += kPartBytes;
    };
    for (const Run& run : runs_) write(part_of(run, piece));
    write({nullptr, Type::float32, end});
  }

 private:
  static constexpr std::int64_t kPartBytes = sizeof(Part);
  struct Run {
    Type type;
    std::int64_t begin, offset;
  };

  static std::int64_t aligned(std::int64_t offset) { return (offset + 15) / 16 * 16; }
  static Part part_of(const Run& run, const unsigned char* piece) { return {piece + run.offset, run.type, run.begin}; }
  void add(std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      while (part_[1].begin <= begin) ++part_;
      const std::int64_t item = afflux::bytes(part_->type), last = std::min(part_[1].begin, end);
      if (runs_.empty() || runs_.back().type != part_->type) {
        bytes_ = aligned(bytes_) + begin * item % 16;
        runs_.push_back({part_->type, begin, bytes_});
      }
      const auto* const from = static_cast<const unsigned char*>(part_->data) + (begin - part_->begin) * item;
      copies_.push_back({from, bytes_, (last - begin) * item});
      bytes_ += (last - begin) * item;
      begin = last;
    }
  }

  const Part* part_;  // of the last element
  std::vector<Copy> copies_;
  std::vector<Run> runs_;
  std::int64_t bytes_ = 0;
};

// A part, or a list of parts on the device.
struct SentParts {
  Part first;
  const Part* list;
  std::int64_t count;
};

// Sends an update, whole superblocks at a time, to the device.
template <class Executor>
class Sender {
 public:
  // The parts are those of Backend::ingest. Up to `num_threads` threads copy them.
  Sender(Executor& executor, std::int32_t device, const Part* first, const Part* last, int num_threads)
      : executor_(executor), ring_(executor, device), cargo_(first), num_threads_(num_threads) {
    direct_ = std::all_of(first, last, [](const Part& part) {
      const std::int64_t bytes = ((&part)[1].begin - part.begin) * afflux::bytes(part.type);
      return bytes == 0 || Executor::reads_itself(part.data, bytes);
    });
  }

  // Sends the superblocks from `begin` on, and sets `end` to their end. The result is valid until the next call.
  SentParts send(std::int64_t begin, std::int64_t size, std::int64_t* end) {
    *end = cargo_.load(begin, size);
    const std::int64_t total = cargo_.total();
    if (total > kPieceBytes) {  // many short parts, of different types
      std::vector<unsigned char> staged(static_cast<std::size_t>(total));
      auto* const device = static_cast<unsigned char*>(executor_.allocate(total));
      fill(staged.data());
      cargo_.write_list(*end, device, staged.data() + cargo_.list());
      executor_.upload(device, staged.data(), total);
      return sent(device);
    }
    typename Executor::Piece& piece = ring_.next();
    std::int64_t from = 0;
    if (direct_) {
      send_directly(piece.device);
      from = cargo_.list();
    } else {
      fill(piece.host);
    }
    if (cargo_.parts() > 1) cargo_.write_list(*end, piece.device, piece.host + cargo_.list());
    if (from < total) executor_.send(piece.device + from, piece.host + from, total - from);
    executor_.mark(piece);
    return sent(piece.device);
  }

 private:
  SentParts sent(const unsigned char* device) const {
    return {cargo_.first_part(device), reinterpret_cast<const Part*>(device + cargo_.list()), cargo_.parts()};
  }
  void fill(unsigned char* to) const {
    const auto& copies = cargo_.copies();
    parallel_for(static_cast<std::int64_t>(copies.size()), num_threads_, [&](std::int64_t i) {
      const Cargo::Copy& copy = copies[static_cast<std::size_t>(i)];
      std::memcpy(to + copy.to, copy.from, static_cast<std::size_t>(copy.bytes));
    });
  }
  // Neighbours in the caller's memory are one copy.
  void send_directly(unsigned char* to) {
    const auto& copies = cargo_.copies();
    for (std::size_t i = 0; i < copies.size();) {
      std::int64_t bytes = 0;
      const Cargo::Copy& first = copies[i];
      for (; i < copies.size() && copies[i].from == first.from + bytes && copies[i].to == first.to + bytes; ++i)
        bytes += copies[i].bytes;
      executor_.send(to + first.to, first.from, bytes);
    }
  }

  Executor& executor_;
  Ring<Executor> ring_;
  Cargo cargo_;
  const int num_threads_;
  bool direct_;  // true: all of the update is memory that the device reads itself
};

}  // namespace afflux::cuda
