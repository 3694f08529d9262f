// apply: common rounds are computed in registers (fused.cpp); all others, and the last elements of common rounds, tile
// by tile. Each stage reads and writes a tile of the direction, which stays in L1 between the stages. The element type
// is chosen for each tile and stage, not for the whole sweep, so that a new type adds code and does not multiply it.
#include "cpu/calibrate.hpp"
#include "cpu/calibrate_encoded.hpp"
#include "cpu/combine.hpp"
#include "cpu/fused.hpp"
#include "cpu/kernels.hpp"
#include "cpu/noise.hpp"
#include "cpu/rule_vectors.hpp"
#include "cpu/step.hpp"
#include "cpu/trim.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Sets v = params_weight * params + the rule vectors' part of the direction. T is the type of params.
template <class T>
AFFLUX_FN void start(const Pass& pass, Tile tile, double* __restrict v) {
  for (std::int64_t i = 0; i < tile.size; ++i) v[i] = 0.0;
  const T* const params = tile_of<T>(pass.params, tile);
  if (pass.combine.params_weight != 0.0) add_weighted(&params, &pass.combine.params_weight, 1, tile, v);
  combine<T>(pass.rule_vectors.vectors, pass.rule_vectors.weights.data, tile, v);
}

// Adds stage 2 to v: the differences of the updates, and the mean of the rows before or after the round.
template <class T>
AFFLUX_FN void calibrate(const Pass& pass, const RowHeads* heads, const MemoryUse& memory, Tile tile, double* v) {
  const Calibrate& stage = pass.calibrate;
  const bool encoded = plain_bytes(stage.codec) == 0, weighted = formula::weighs_differences(stage.kind);
  if (weighted && !encoded) add_mean(stage.sum, stage, tile, v);
  if (encoded && weighted)
    stage.quantize_direction ? add_encoded_differences<true, true, T>(pass, heads, memory, tile, v)
                             : add_encoded_differences<true, false, T>(pass, heads, memory, tile, v);
  else if (encoded)
    add_encoded_differences<false, false, T>(pass, heads, memory, tile, v);
  else
    weighted ? add_all_differences<true, T>(pass, tile, v) : add_all_differences<false, T>(pass, tile, v);
  if (!weighted) add_mean(stage.sum_out, stage, tile, v);
}

// Adds the updates' part of the direction to v. T is the type of the updates.
template <class T>
AFFLUX_FN void direction(const Pass& pass, const RowHeads* heads, const MemoryUse& memory, Tile tile, double* v,
                         double* work) {
  if (pass.combine.trim > 0.0)
    add_trimmed<T>(pass.combine, work, tile, v);
  else if (pass.calibrate.kind == Calibration::none)
    combine<T>(pass.combine.updates, pass.combine.weights.data, tile, v);
  else
    calibrate<T>(pass, heads, memory, tile, v);
}

// Returns the elements of a tile, which are whole runs of the codec.
AFFLUX_FN std::int64_t tile_size(const Pass& pass) {
  if (run_of(pass.calibrate.codec) == kBlock) return kBlock;
  return pass.combine.updates.size < kManyUpdates || pass.rule_vectors.next.size > 0 ? kTile : kLongTile;
}

// Returns true if update k is read: for the direction, a row or a rule vector.
AFFLUX_FN bool is_read(const Pass& pass, std::int64_t k) {
  const std::int64_t held = pass.rule_vectors.next.size > 0 ? pass.rule_vectors.vectors.size : 0;
  bool read = has_work(pass, k);
  for (std::int64_t s = 0; s < held; ++s)
    read = read || pass.rule_vectors.next.data[s * (held + pass.combine.updates.size) + held + k] != 0.0;
  return read;
}

// Returns true if all updates that are read are valid. Their tiles are in the caches after the stages that read them.
template <class T>
AFFLUX_FN bool all_valid(const Pass& pass, Tile tile) {
  Soundness sound(pass.combine.most);
  for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
    if (!is_read(pass, k)) continue;
    const T* const update = tile_of<T>(pass.combine.updates.data[k], tile);
    simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE { sound.check(lanes.load(update + i)); });
  }
  return sound.everywhere();
}

// Returns the prefetch distance of tiles in bytes. Stages that compute more between two reads prefetch earlier, so that
// some reads are always in progress.
AFFLUX_FN std::int64_t tiles_ahead(const Pass& pass, Type updates, std::int64_t prefetch) {
  const bool encoded = pass.calibrate.kind != Calibration::none && plain_bytes(pass.calibrate.codec) == 0;
  const bool computes = encoded || updates == Type::bfloat16 || pass.rule_vectors.next.size > 0;
  return prefetch > 0 && computes ? simd::kPrefetchDistance : prefetch;
}

AFFLUX_FN bool apply_tiled(const Pass& pass, Type updates, const RowHeads* heads, const MemoryUse& memory,
                           std::int64_t begin, std::int64_t end, double* work) {
  const bool wide = pass.params.type == Type::float64;
  const std::int64_t ahead = tiles_ahead(pass, updates, memory.prefetch);
  const bool renews = pass.rule_vectors.next.size > 0;
  const bool together = renews && pass.calibrate.kind == Calibration::none && pass.combine.trim == 0.0;
  const bool from_zero = starts_from_zero(pass);
  const std::int64_t size = tile_size(pass);
  alignas(64) double v[kLongTile];
  bool sound = true;
  for (Tile tile{begin, size, ahead}; tile.begin < end; tile.begin += size) {
    if (end - tile.begin < size) tile.size = end - tile.begin;
    if (!from_zero) wide ? start<double>(pass, tile, v) : start<float>(pass, tile, v);
    if (!together)
      with_type(updates,
                [&](auto sample) AFFLUX_INLINE { direction<decltype(sample)>(pass, heads, memory, tile, v, work); });
    // renew() has memory for a short tile only. Long tiles exist only with rotated rows here, for which `together` is
    // false, and which have no noise.
    for (Tile part{tile.begin, kTile, ahead}; renews && part.begin < tile.begin + tile.size; part.begin += kTile) {
      if (tile.begin + tile.size - part.begin < kTile) part.size = tile.begin + tile.size - part.begin;
      sound = renew(pass, updates, part, v, together) && sound;
    }
    const NoisySum noisy{pass.combine.noise.sigma, v};
    if (noisy.coefficient > 0.0 && !renews) add_noise(pass.combine, updates, tile, &noisy, 1);
    if (pass.combine.most != kNoLimit)
      with_type(updates, [&](auto sample) AFFLUX_INLINE { sound = all_valid<decltype(sample)>(pass, tile) && sound; });
    sound = (wide ? step<double>(pass, tile, v) : step<float>(pass, tile, v)) && sound;
  }
  return sound;
}

}  // namespace

bool apply(const Pass& pass, const RowHeads* heads, const MemoryUse& memory, std::int64_t begin, std::int64_t end,
           double* work) {
  const List<View<const void>>& all = pass.combine.updates;
  const Type updates = all.size > 0 ? all.data[0].type : Type::float32;
  const bool some_fused = memory.fused && can_fuse(pass, updates);
  const std::int64_t middle = some_fused ? end - (end - begin) % simd::kWide : begin;
  bool sound = true;
  if (some_fused) sound = apply_fused(pass, updates, memory, begin, middle);
  return apply_tiled(pass, updates, heads, memory, middle, end, work) && sound;
}

}  // namespace afflux::AFFLUX_ISA
