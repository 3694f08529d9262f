"""What `mutants.py` breaks in the engine and its bindings: formulas, orders of sums, edges."""

ENGINE = """
test_unflatten.py
unflatten: arrays may share memory
-  overlaps.refuse("unflatten");

test_trim.py
trim: a rest below M units is kept
-below = low + count - 1;
+below = low;
trim: a half is the upper median
-low = 0, below = (total - count) / 2;
+low = 0, below = total / 2;
trim: equal values are in any order
-(y < x) | ((y == x) & (w < v))
+y < x

test_noise.py
noise: a bit of the radius less
-integer = radius >> 11,
+integer = (radius >> 12) << 1,
noise: a rule vector that is 1 at itself has none
-kept[s] = stays(row, s, count) && in_noise == 0.0;
+kept[s] = stays(row, s, count);
noise: shards draw the same
-first = stage.noise.first + tile.begin;
+first = tile.begin;

test_layout_errors.py
unflatten: an integer may be one too large
-if (!(value >= low && value < past))
+if (!(value >= low && value <= past))

test_policy.py
step: a state is not looked at
-      sound.check(values[k]);
fused: the updates are not looked at
-if (kChecks) sound_.check(updates_[k] + i, values);
tiles: the updates are not looked at
-{ sound.check(lanes.load(update + i)); });
+{ (void)lanes, (void)i; });
fused: the rule vector takes the direction's weights
-    if (other != 0.0) renewed = formula::weighted(renewed, lanes.fill(other), values);
+    if (other != 0.0) renewed = formula::weighted(renewed, lanes.fill(weight), values);
fused: a renewed rule vector is not looked at
-      sound_.check(renewed);
fused: what goes past the caches is something else
-      simd::Vector::stream(values + i, value);
+      simd::Vector::stream(values + i, value + 1.0);
ingest: past the caches from the part's beginning
-copy_lines(part, at, n, ahead, copy,
+copy_lines(part, 0, n, ahead, copy,
policy: a bad one is found after the heads are written
-  kernels();
-  const MemoryUse memory
+  rows::finish(written, codec, pass.params.size, device);
+  const MemoryUse memory
fused: more updates than there is room for
-kMostFused : kMostFused / 2);
+kMostFused : kMostFused);
soundness: a NaN has a sign
-((Longs)values & kMagnitude)
+(Longs)values
calibrate: the cached mean is off
-lanes.load(sum + i), lanes.fill(share)
+lanes.load(sum + i) + 1e-9, lanes.fill(share)

test_limits.py
fused: a state is not looked at
-      sound_.check(values[k]);
rule vectors: what is written is not looked at
-    sound.check(value);

test_stages.py
combine: a factor that is almost one
-return acc + weight * value;
+T scaled = value;
+  for (unsigned k = 0; k < sizeof(T) / 8; ++k) ((double*)&scaled)[k] *= 1 + 1e-9;
+  return acc + weight * scaled;
step: a learning rate that is almost right
-return params + lanes.fill(step.lr) * direction
+return params + lanes.fill(step.lr * (1 + 1e-9)) * direction
nesterov: the velocity has no beta in the step
-(direction + lanes.fill(step.beta1) * states[0])
+(direction + states[0])
nesterov: no dampening
-lanes.fill(step.beta1), lanes.fill(1.0 - step.beta2));
+lanes.fill(step.beta1), lanes.fill(1.0));
fused: the mean comes before the rows
-    if (!kWeighted) direction = formula::add_cached_mean(direction, sum, lanes.fill(share_));
-    return
+    return
fused: what is left over is forgotten
-  return apply_tiled(pass, updates, heads, memory, middle, end, work) && sound;
+  return (some_fused || apply_tiled(pass, updates, heads, memory, middle, end, work)) && sound;
step: epsilon under the root's scale
-(root * lanes.fill(step.root_scale) + lanes.fill(step.epsilon))
+((root + lanes.fill(step.epsilon)) * lanes.fill(step.root_scale))
step: Yogi without its sign
-return zero < x ? one : (x < zero ? -one : x);
+return one;
step: AMSGrad's root of v
-square = states[2] = greater(states[2], square);
+states[2] = greater(states[2], square);
step: from the rounded state
-return params + lanes.fill(step.lr) * states[0];
+for (unsigned k = 0; k < sizeof(T) / 8; ++k)
+      ((double*)states)[k] = static_cast<float>(((double*)states)[k]);
+    return params + lanes.fill(step.lr) * states[0];
calibrate: the cached mean of before
-return kind == Calibration::cached_difference;
+return kind != Calibration::none;
memory: one that changes is not written
-if (row[k] != (k == s ? 1.0 : 0.0)) return false;
+if (k == s && row[k] != 1.0) return false;
simd: a vector of -0.0 is filled with +0.0
-return value - Doubles{};
+return Doubles{} + value;

test_cut_vectors.py
parts: what crosses a border is not written back
-    if (view.writes) view.vector->scatter(chunk, view.scratch);
parts: past the caches wherever the whole vector would begin on a line
-reinterpret_cast<std::uintptr_t>(values + begin) %
+reinterpret_cast<std::uintptr_t>(values) %
parts: every part has the base of the first
-bases->list.data[number]
+bases->list.data[0]
parts: encoded rows in chunks that are no blocks
-  Cut cut(parts, encoded);
+  Cut cut(parts, encoded && false);
parts: neither borders nor sizes are compared
-fail(op, name.str() + " is cut at other borders than " + overlaps.first_in_parts());
+;

test_ops.py
gram: a superblock begins with the sums of the one before
-    std::fill(out.begin(), out.end(), 0.0);
edges: a zero weight is read
-if (all_weights[k] == 0.0) continue;
edges: the last block's bad value is missed
-if (formula::finite(squares) || sums.first_nonfinite >= 0) continue;
+if (formula::finite(squares) || sums.first_nonfinite >= 0 || n < kBlock) continue;

test_bits.py
combine: fused multiply-add
-return acc + weight * value;
+T sum = acc;
+  for (unsigned k = 0; k < sizeof(T) / 8; ++k)
+    ((double*)&sum)[k] = __builtin_fma(((double*)&weight)[k], ((double*)&value)[k], ((double*)&acc)[k]);
+  return sum;
gram: products of mixed types are fused
-AFFLUX_FN Doubles dot_term(Doubles acc, Doubles x, Doubles y) {
-  if constexpr (sizeof(X) == sizeof(double) || sizeof(Y) == sizeof(double))
+AFFLUX_FN Doubles dot_term(Doubles acc, Doubles x, Doubles y) {
+  if constexpr (sizeof(X) == sizeof(double) && sizeof(Y) == sizeof(double))
order: lanes added one after the other
-for (int half = count / 2; half > 0; half /= 2)
-    for (int lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
+for (int lane = 1; lane < count; ++lane) lanes[0] = lanes[0] + lanes[lane];
order: an unbalanced tree over superblocks
-while (left * 2 < count) left *= 2;
+left = count - 1;
types: products of float64 are fused
-AFFLUX_FN Doubles dot_term(Doubles acc, Doubles x, Doubles y) {
-  if constexpr (sizeof(X) == sizeof(double) || sizeof(Y) == sizeof(double)) return acc + x * y;
+AFFLUX_FN Doubles dot_term(Doubles acc, Doubles x, Doubles y) {
threads: the caller's floating-point mode is kept
-_mm_setcsr(0x1F80);

test_rules.py
calibrate: wrong sign of the cached mean
-return acc + sum * share;
+return acc - sum * share;

test_coded_rounds.py
calibrate: the cache sum in float32
-  if (weighted && !encoded) add_mean(stage.sum, stage, tile, v);
+  double* const sum = pass.calibrate.sum.data + tile.begin;
+  for (std::int64_t i = 0; i < tile.size; ++i) sum[i] = static_cast<float>(sum[i]);
+  if (weighted && !encoded) add_mean(stage.sum, stage, tile, v);

test_inner.py
inner: the last row is not padded
-for (; n % kLanes != 0; ++n)
-    for (std::int64_t k = 0; k <= inner.vectors.size
+for (; n % kLanes != 0; ++n)
+    for (std::int64_t k = 0; k < inner.vectors.size - 1
inner: a vector of weight 0 is added
-if (kWithE && inner.weights.data[k] != 0.0)
+if (kWithE)
inner: the memory's part of the sum is left out
-if (kWithE && inner.memory_weight != 0.0) e =
+if (kWithE && inner.memory_weight != inner.memory_weight) e =
inner: in registers a vector of weight 0 is added
-if (inner.vectors.data[k].type != type || inner.weights.data[k] == 0.0) return nullptr;
+if (inner.vectors.data[k].type != type) return nullptr;
inner: in registers any memory is float32
-if (shifts && inner.memory.type != Type::float32) return nullptr;
inner: in registers the tail is left out
-if (tiles < block_end) sum(inner
+if (fused == nullptr) sum(inner

test_elementary.py
elementary: ln 2 in 53 bits
-double_of(0x3C7ABC9E3B39803Fu)
+0.0

test_types.py
edges: an overflowing sum of squares counts as a bad value
-    if (!formula::finite(simd::Single::load(x + i))) return i;
-  return -1;
+    if (!formula::finite(simd::Single::load(x + i))) return i;
+  return 0;
types: bfloat16 rounds ties away from zero
-bits + 0x7FFFu + ((bits >> 16) & 1u)
+bits + 0x8000u
types: subnormals of float16 are flushed
-return float_of(sign | (normal & is_normal) | (subnormal & ~is_normal));
+return float_of(sign | (normal & is_normal));
parts: a part is read from its front in every block
-const std::int64_t at = begin - part->begin;
+const std::int64_t at = 0;

test_conversion.py
conversion: the base is not as the client saw it
-base = seen_as(part.type, base, n, base_room);
+(void)base_room;
conversion: a gradient points downhill
-return -sent / scale;
+return sent / scale;
conversion: what is beyond float16 stays finite
-infinity = 0x7C00u, quiet_nan
+infinity = 0x7BFFu, quiet_nan

test_codecs.py
codec: the grid's end lies below the largest value
-(bits_of(step) + 0x10Fu) & 0xFFFFFF00u
+bits_of(step) & 0xFFFFFF00u
codec: beyond bfloat16 lies infinity
-rounded < 0x7F80u ? rounded : 0x7F7Fu
+rounded
codec: far beyond float16 lies infinity
-lesser(all(65504.0f), floats_of(bits_of(values) & 0x7FFFFFFFu))
+floats_of(bits_of(values) & 0x7FFFFFFFu)
codec: just beyond float16 lies infinity
-(kept < most ? kept : most)
+kept
codec: all blocks draw the same
-(static_cast<std::uint64_t>(block) + 1)
+(static_cast<std::uint64_t>(block) * 0 + 1)

test_coded_rounds.py
calibrate: old rows count whole in the direction
-update - factor * row);
+update - row);
calibrate: the sum counts whole in the direction
-  return stage.factor * (1.0 / static_cast<double>(stage.num_clients));
+  return 1.0 / static_cast<double>(stage.num_clients);
"""
