// The heads of encoded rows: copied to the host, and written to the rows.
#pragma once
#include "api/kernels.hpp"
#include "cuda/block.hpp"
#include "cuda/staging.hpp"

namespace afflux::cuda {

// The kernel that copies the heads of some rows, one after the other.
struct ReadHeadsBody {
  static constexpr int kThreads = kRowHead;
  struct Shared {};

  const unsigned char* const* rows;
  unsigned char* heads;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    block.each([&](int thread) { heads[block.index * kRowHead + thread] = rows[block.index][thread]; });
  }
};

// The kernel that writes heads to rows, and sets the padding of the rows to 0.
struct WriteHeadsBody {
  static constexpr int kThreads = 256;
  struct Shared {};

  unsigned char* const* rows;
  const unsigned char* heads;
  Padding padding;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    unsigned char* const row = rows[block.index];
    block.each([&](int thread) {
      if (thread < kRowHead) row[thread] = heads[block.index * kRowHead + thread];
      for (std::int64_t i = padding.facts_begin + thread; i < padding.facts_end; i += kThreads) row[i] = 0;
      for (std::int64_t i = padding.codes_begin + thread; i < padding.codes_end; i += kThreads) row[i] = 0;
    });
  }
};

// New heads on the device, which are written after the codes.
class StagedHeads {
 public:
  template <class Executor>
  StagedHeads(Executor& executor, const NewHeads& renewed) : count_(static_cast<std::int64_t>(renewed.rows.size())) {
    Staging staging;
    const std::int64_t rows = staging.add(renewed.rows.data(), count_);
    const std::int64_t heads = staging.add(renewed.heads.data(), count_ * kRowHead);
    staging.upload(executor);
    body_ = {staging.at<unsigned char* const>(rows), staging.at<const unsigned char>(heads), renewed.padding};
  }
  template <class Executor>
  void write(Executor& executor) const {
    executor.run(count_, body_);
  }

 private:
  std::int64_t count_;
  WriteHeadsBody body_;
};

template <class Executor>
std::vector<unsigned char> read_heads(const Where& where, const std::vector<const unsigned char*>& rows) {
  Executor executor(where);
  const std::int64_t count = static_cast<std::int64_t>(rows.size()), bytes = count * kRowHead;
  Staging staging;
  const std::int64_t staged = staging.add(rows.data(), count);
  const auto heads = static_cast<unsigned char*>(executor.results(bytes));
  staging.upload(executor);
  executor.run(count, ReadHeadsBody{staging.at<const unsigned char* const>(staged), heads});
  std::vector<unsigned char> fetched(static_cast<std::size_t>(bytes));
  executor.fetch(fetched.data(), heads, bytes);
  return fetched;
}

template <class Executor>
void write_heads(const Where& where, const NewHeads& renewed) {
  Executor executor(where);
  StagedHeads(executor, renewed).write(executor);
}

}  // namespace afflux::cuda
