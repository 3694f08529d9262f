"""What `mutants.py` breaks in rules, their parts and the simulator."""

RULES = r"""
test_limits.py
reach: an adaptive step without the bound of epsilon
-lambda step, d: d / step.epsilon
+lambda step, d: 60 * d
reach: yogi's second moment ends at the square
-(2 - step.beta2) * d * d
+d * d
reach: the direction of one arrival, not its size
-lambda step, d: d / (1 - step.beta1), lambda
+lambda step, d: 1 / (1 - step.beta1), lambda

test_dialects.py
dialects: the law of NVFlare without its one more
-return 1.0 / (1.0 + sqrt(1.0 + staleness))
+return 1.0 / (1.0 + sqrt(staleness))
dialects: the mean over versions is over the buffer
-pulled.count(v)
+len(pulled)

test_by_hand.py
selection: stage two clips what the first clip has left out
-clip * _shrink(clip * norm, bound)
+clip * _shrink(norm, bound)
selection: the step's clips forget the memory
-own = self.alpha * ordered_sum(step)
+own = self.alpha
selection: products with the unclipped estimate
-if any(clip < 1.0 for clip in clips):
+if any(clip < 0.0 for clip in clips):
score: scaled and unscaled are exchanged
-(goal if self.scaled else square)
+(square if self.scaled else goal)
score: the mean is over the rejected too
-weights / max(accepted, 1)
+weights / len(arrivals)
selection: every law counts from the freshest
- if isinstance(law, Exponential) and not raw else 0
+ if not raw else 0
selection: a large beta overflows
-self.beta * (cosine - top)
+self.beta * cosine
step: bias correction counts from zero
-steps = arrivals.version + 1.0
+steps = max(arrivals.version, 1.0)

test_rules.py
delayed: the velocity takes in the sum of the steps, not their mean
-following[0] + following[1] / period
+following[0] + following[1]
selection: the threshold is on the wrong side
-            if cosine < self.sim_min
+            if cosine <= self.sim_min
selection: without it nothing is clipped
-is_bounded = self.clip is not None and self.clip != inf
+is_bounded = False
score: the threshold is on the wrong side
-if score < -self.gamma
+if score <= -self.gamma
score: the bound is epsilon
-score < -self.gamma * self.epsilon:
+score < -self.epsilon:
scheduling: a pass keeps the sum of the last one
-            rounds = 0.0
+            rounds, next_[1, 1] = 0.0, 1.0
rates: a delay of the threshold shortens the step
-if tau_max <= self.threshold:
+if tau_max < self.threshold:
step: v_hat starts at 0
-"v_hat": self.initial_v}
+"v_hat": 0.0}
weigh: staleness counted from one
-base = 1.0 + staleness
+base = 2.0 + staleness

test_arrivals_inner.py
Arrivals.inner: a failed round stays open
-        note_stored_frames()
-        if products is not None:
-            products.close()
+        note_stored_frames()

test_facts.py
given: a weight beyond the limits counts
-return value if LEAST_GIVEN <= value <= MOST_GIVEN else 0.0
+return value

test_rounds.py
weigh: an arrival that is rejected may count
-if values[i] != 0 and len(rejected) < count:
+if False:

test_step.py
fedasync: a round of several models goes beyond them
-weigh = Staleness(staleness, scale=one_or_less(
+weigh = Staleness(staleness, normalise=None, scale=one_or_less(

test_options.py
limit of staleness: a state may have older arrivals
-most is not None and staleness > most:
+False:

test_host_facts.py
inplace: an interrupt leaves a version without its params
-if self.inplace and admission.version == number:
+if False:
inplace: an interrupt leaves params without their version
-if aggregator.inplace or admission.current is not before:
+if admission.current is not before:

test_streaming.py
streaming: the factor of a shifted exponential law
-isinstance(law, Exponential) and not raw
+isinstance(law, Exponential)

test_noise_rules.py
noise: a part need not say that it adds noise
-if not rule.needs.noise:
-        raise AffluxError(f"[{rule.name}] weigh gave noise
+if False:
+        raise AffluxError(f"[{rule.name}] weigh gave noise
noise: it is lost where weights are checked
-_number(name, "noise", weights.noise)
+0.0 * _number(name, "noise", weights.noise)
noise: that of rule vectors is lost where weights are checked
-None if weights.next_noise is None else _checked_next_noise(rule, weights),
+None if weights.next_noise is None else 0.0 * _checked_next_noise(rule, weights),
noise: rule vectors have that of the direction
-next=weights.next_noise)
+next=None if weights.next_noise is None else weights.next_noise * 0 + weights.noise)
noise: a rule vector that is 1 at itself keeps its memory
-any(value != (k == s) for k, value in enumerate(row)) or (noise is not None and noise[s] != 0):
+any(value != (k == s) for k, value in enumerate(row)):
noise: every version has its own nonce only
-return urandom(12)
+return version.to_bytes(12, "little")
noise: limits count 8 sigma
-+ 9 * noise
++ 8 * noise

test_trimmed_rules.py
trim: a part need not say that it trims
-if not rule.needs.trim:
+if False:
trim: it is lost where weights are checked
-_number(name, "trim", weights.trim)
+0.0 * _number(name, "trim", weights.trim)
trim: the buffers of models are not trimmed
-averaged, trim=weights.trim
+averaged, trim=0.0

test_robust.py
krum: one more neighbour counts
-for square in squares])[:near]
+for square in squares])[: near + 1]
krum: a flushed buffer of too few makes a step
-if self.byzantine and count < 2 * self.byzantine + 3:
+if False:
once: clients may fill a buffer by default
-once = rule.calibrate.cached or rule.needs.once
+once = rule.calibrate.cached
once: both arrivals are not refused
-if rule.needs.once and duplicates == "both":
+if False:
dampening: the rate is not smaller
-lr * (1.0 - self.dampening)
+lr

test_codec_errors.py
codec: the errors of all rows are one
-row_key(seed, 1, number)
+row_key(seed, 1, 0)

test_sim_local.py
controls: all steps draw the same
-[True] * len(clients), self._steps, extremes
+[True] * len(clients), 0, extremes
controls: the keys are those of the rule's rows
-RowCache(MemoryRows(size, codec), num_clients, ~seed)
+RowCache(MemoryRows(size, codec), num_clients, seed)

test_sim_finished.py
reproduce: a run with another setting has ended
-for name in ("options", "seed", "config"))
+for name in ("options", "seed"))
reproduce: a line that was cut off is a run
-.split("\n")[:-1]
+.splitlines()
reproduce: differences are not paired
-a.late_score() - b.late_score() for
+a.late_score() - others[0].late_score() for
"""
