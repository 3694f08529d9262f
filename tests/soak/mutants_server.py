"""What `mutants.py` breaks in the server, its rounds and its store."""

SERVER = """
test_unflatten.py
targets: strided arrays may share memory
-            if np.shares_memory(_memory(array), _memory(other_array)):
+            if False:
targets: autograd does not see that a tensor is written
-        count_writes(arrays)
+        pass

test_rules.py
round: no canonical order
-  std::sort(places.begin(), places.end());
store: of a client's arrivals the first stays
-readers = {client_id: i for i, client_id in enumerate(client_ids)}
+readers = {client_id: i for i, client_id in reversed([*enumerate(client_ids)])}

test_ids.py
round: texts come before ints
-return std::tie(client, version, join) < std::tie(other.client, other.version, other.join);
+if (client.index() != other.client.index()) return client.index() > other.client.index();
+return std::tie(client, version, join) < std::tie(other.client, other.version, other.join);

test_store_ids.py
store: an unsigned id is kept as the signed one of the same bytes
-client_id.to_bytes(8, "big") if isinstance(client_id, int) and client_id >= 2**63 else client_id
+client_id - 2**64 if isinstance(client_id, int) and client_id >= 2**63 else client_id

test_rules_contract.py
round: the canonical order forgets the version
-return std::tie(client, version, join) < std::tie(other.client, other.version, other.join);
+return std::tie(client, join) < std::tie(other.client, other.join);

test_facts.py
facts: a plain push passes a rule that needs them
-if pools and not (admission.rule.needs.facts or options.accumulate):
+if pools and not options.accumulate:
facts: arrivals that are left keep the facts of all
-frozen(own[places], np.float64) for name, own
+own for name, own

test_progress.py
progress: a round does not start the counts anew
-    state.counts_at_round = state.counts;

test_statistics.py
round: a negative weight weighs statistics
-plain = not total > 0 or min(weights) < 0
+plain = not total > 0
round: statistics on which all agree are computed
-np.putmask(mean, same, before)
+pass

test_roles.py
layout: further names of a tied array are unknown
-if n in names or walk.aliases.get(n, n) not in firsts}
+if True}
layout: a constant is not compared
-if other.ctypes.data == own.ctypes.data or np.array_equal(other, own):
+if True:

test_server.py
server: a failing rule loses the buffer
-        decided = prepare(self.admission.rule
+        self.admission.cut("discard", None)
+        decided = prepare(self.admission.rule

test_passes.py
passes: a client that has entered gets a task
-if admission.blocks(client_id):
+if False:
passes: the last round of a pass that is ended is as any other
-self.in_passes and (ends_pass or self.left_in_pass
+self.in_passes and (self.left_in_pass
passes: a pass without waiting arrivals does not end
-if decided is not None or (ends_pass and draft.entered):
+if decided is not None:
passes: the clients of discarded arrivals stay blocked
-state.pass->leave(filled);
+state.pass->leave(0);

test_participations.py
participations: a client is in one round more
-  return rounds >= *settings_.participations;
+  return rounds > *settings_.participations;
participations: rounds that are skipped do not count
-  if (round && settings_.participations) {
+  if (round && round->steps && settings_.participations) {
participations: discarded arrivals count
-  if (round && settings_.participations) {
+  if (settings_.participations) {
participations: rounds in drafts do not count
-    client.set_rounds(client.rounds() + 1);
-    state_.participants.push_back
+    state_.participants.push_back
participations: a loaded state counts from 0
-client : saved.participants) client.set_rounds(client.rounds() + 1);
+client : saved.participants) client.set_rounds(0);
participations: a decided round is not in its commit
-          static_cast<std::int64_t>(clients_that_entered().size()),
+          in_passes() ? state().pass->entered() : 0,
participations: a commit writes the list from the buffer's clients on
-        open_ = 0 if participation.num_clients is None else state.filled
+        open_ = state.filled
participations: a repair takes lost arrivals from the counts
-    if lost and store.facts["server"].get("participations") is None:
+    if lost and last.lists["passed"]:
participations: a store may commit later
-        if store and rule.needs.participations is not None and self.commit_every != 1:
+        if False:
participations: a state without counts is loaded
-            saved = meta[name]
+            saved = expected if name in ABSENT else meta[name]

test_core_loop.py
participations: the last version of a run that ends early is not evaluated
-        if self._evaluated != newest.version:
+        if False:

test_store_crashes.py
store: a round writes over the committed sum
-if slot != self.committed.get(name)]
+if slot == self.committed.get(name, 0)]
store: a row is replaced in its committed slot
-if each not in changed or readers[each] > i]
+if places[each] is None or readers[each] > i]
store: a freed slot is used before the commit
-(left if client_id in self.slots else retired).append(slot)
+left.append(slot)
store: the params of the last commit are given out again
-        self._committed_params = params
+        self._committed_params = params[:0]

test_sharded_stores.py
shards: params are written in place
-plans, drafts = self._plans(plan, rows), self.drafted(op)
+plans, drafts = self._plans(plan, rows), Shards([type(d)(p.base) for d, p in zip(self.drafts(op).parts, params.parts)])
shards: each part chooses the slot of a version
-while self._params.slot_of(as_array(draft := self._versions.take(op))) != slot:
+while (draft := self._versions.take(op)) is None:
shards: a row slot that the commit names is given out again
-(left if client_id in self.slots else retired).append(slot)
+left.append(slot)
shards: a part of a row has the checksums of another one
-first = self.begin // SUPERBLOCK + self.number * heads
+first = self.begin // SUPERBLOCK
shards: some parts do not record a commit
-if self._commit is not None:  # an interrupt
+if False:  # an interrupt
shards: an interrupted close leaves the lock
-aggregator.locked(partial(store.close, detach=True))
+pass

test_shards_apart.py
shards: a round is prepared anew by each message
-if self._prepared is None or self._prepared[0] != number:
+if True:
ray: a sweep is made again after a lost reply
-        if not prepared.swept:
-            prepared.make(prepared.swept)
+        if True:
+            prepared.make(prepared.swept)
ray: a call of an older epoch is made
-if epoch < self._epoch:
+if False:
ray: objects of dropped handles stay
-        self._objects.pop(number, None)
+        pass

test_store_errors.py
store: a version is published before it is saved
-return self.saved and bool(self.done)
+return bool(self.done)
store: a damaged row passes
-if row_crc(self.row(place.slot), self.codec) == place.crc:
+if len(row_crc(self.row(place.slot), self.codec)) == len(place.crc):
store: a row that was found damaged beside the sweep passes
-if check is None or not check.sound:
+if check is None:
store: a push does not wait for its row
-        ticket.staged_row = row.finish()
+        pass
store: a failed opening leaves a lock
-self.path = folder_of(path)
-        self.device
+self.path = path
+        self.device

test_recent.py
store: a place that was read before a commit is kept after it
-            if generation == self.generation and not generation % 2:
+            if True:
store: a place that was read amid a commit is kept after it
-            if generation == self.generation and not generation % 2:
+            if generation == self.generation:
store: the end of a list that has become shorter stays
-            if before is None or start < before.ends[table]:
+            if before is None:

test_store_commits.py
store: arrivals of the commit before stay
-        if before is None or before.arrivals:
+        if before is None:
store: how often it commits is forgotten
-self.commit_every: int | None = options["commit_every"]
+self.commit_every: int | None = 1

test_sweep_checksums.py
engine: CRCs of pieces are joined by the wrong length
-      crc = checksum::joined(crc, vector.pieces[static_cast<std::size_t>(begin / piece_)], bytes);
+      crc = checksum::joined(crc, vector.pieces[static_cast<std::size_t>(begin / piece_)], piece_);

test_tasks.py
tasks: a task is pushed twice
-if task_id is not None and not admission.is_open(task_id):
+if False:
tasks: a push is committed without the end of its task
-  entries.append(now_.task_events, event);
tasks: params are held however old they are
-state_.version - *settings_.rules.max_staleness);
-  ++changes_;
-}
-
-void Control::abandon
+state_.version - 2 * *settings_.rules.max_staleness);
+  ++changes_;
+}
+
+void Control::abandon

test_task_versions.py
tasks: a round that is over holds its versions
-        del self.prepared, self.plan, self.terms

test_step.py
control: a step leaves the tasks of its pushes open
-if (draft != nullptr)
-    draft->closed.push_back(task);
+if (draft != nullptr)
+    (void)draft;
limits: a vector that a step reads in place may hold anything finite
-, before.limits.max_abs if unchecked else inf
+, inf
step: plain pushes may share memory
-  if (share_memory(step.memory)) return py::none();  // Python finds out which
step: a model is read with the version of the push before
-    if (!own.is(step->base)) step->conversion
+    if (is_none(step->base)) step->conversion
step: an array is not looked at again
-  if (parts.lent && !writes(access) && parts.lent->is_of(parts.arrays)) return parts.lent;
+  if (parts.lent && !writes(access)) return parts.lent;
step: the draft is that before a version was given up
-                    draft = self.admission if batch is None else batch.decided()  # as bases
+                    pass  # as bases
step: a copied entry is left to Python without the others
-    if (!facts && !step.in_place) return py::none();
step: a task may stand twice
-      if (tasks.contains(task)) return py::none();  // only one of them joins
step: the log does not say that its joins have filled the buffer
-self.held_back = sum([receipt.join is not None for receipt in receipts]) if completes else 0
+self.held_back = 0

test_limits.py
limits: the least element is not looked at
-return -self.max_abs <= low and high <= self.max_abs
+return high <= self.max_abs
limits: an unsound version is published
-        if job.unsound:
-            self._fail(job)
-            return False
state: encoded rows are taken as they are
-sound = codec.exact or
+sound = True or

test_conversions.py
push: the newest version is the base of any other
-return newest if newest.version == number else
+return newest if newest.version >= number else
in place: a conversion reads params that a round overwrites
-newest = versions.newest(aggregator)
+pass

test_concurrency.py
joins: a round that is being made is not counted
-decision.staleness = decided - version;
+decision.staleness = state.version - version;

test_log.py
checkpoint: joins start again
-"joins": state.number,
+"joins": 0,

test_composed.py
round: weights with rows are not normalised
-vectors, rule_vectors = frozen(vectors / total, np.float64), rule_vectors / total
+pass

test_identities.py
store: those seen do not count the new ones
-max(moves.counts.clients, 1)
+max(self.counts.clients, 1)

test_store_health.py
store: a lost file takes the rows of the next ones along
-if self.codec is None or place.slot < 0:
+if self.codec is None or not 0 <= place.slot < self.arrays["rows"].slots:

test_streaming_threads.py
streaming: a term that an interrupt has left is added again
-first=not self.place, done=self._done)
+first=not self.place, done=[])
streaming: a join does not wait for the term of an interrupted push
-                self._add_last_term()
-                if status ==
+                if status ==

test_streaming.py
streaming: a total starts with what its memory holds
-self._zeros if first and self.device is HOST else total
+total

test_coded_rounds.py
codec: all versions draw the same
-row_key(self.seed, version, client_id)
+row_key(self.seed, 0, client_id)
codec: one scale for a vector, without its extremes
-extremes if self.codec.ranged else
+extremes if not self.codec.keyed else

test_codecs.py
codec: an unsigned id draws what the signed one of the same bytes draws
-kind, client = b"u", client_id.to_bytes(8, "little")
+kind, client = b"i", client_id.to_bytes(8, "little")

test_replace_rule.py
rule: it is replaced amid a buffer
-const bool at_once = state_.buffer.empty();
+const bool at_once = true;
rule: the next one has the buffer size of the one before
-    state.buffer_size = *state.next_buffer_size;
store: the rule is that of the server's first commit
-if self._newest_rule[0] is not state.rule:
+if self._newest_rule[0] is None:

test_flush_after.py
flush_after: the time of the buffer before counts
-if (state.buffer.filled() == 1) state.since = now;

test_on_step.py
on_step: two calls overlap
-if running is not None and running is not token and running[0] == token[0]:
+if False:

test_layout_matching.py
push: whatever shapes arrays have, they fit
-unready_indices = unready(arrays, self._shapes)
+unready_indices: list[int] = []

test_layout.py
layout: tied names are part of its identity
-"others": others, "nesting": nesting}
+"others": others, "nesting": layout["nesting"]}

test_stored_errors.py
errors: a stored error holds what the calls below used
-                    frame.clear()
+                    pass

test_loading.py
load: vectors stay beyond the limit of slots
-if uncounted and not aggregator.accumulate:
+if False:

test_sharded_plane.py
shards: random bits begin anew in each shard
-return (key + begin // codec.run * _KEY_STEP) % 2**64
+return key
shards: parts are added one after the other
-        left = left_part(count)
-            return join(value(first, left),
+        left = count - self._nodes[-1][1]
+            return join(value(first, left),
shards: a part is swept twice after an interrupt
-                if not swept:
-                    part.make(swept)
+                part.make(swept)
shards: the index of an error is that of the part
-each.first_nonfinite + begin
+each.first_nonfinite
shards: a loaded row has the key of the whole
-[:] = key_at(codec, key, begin)
+[:] = key

test_admission.py
control: a client's arrival from the same version is superseded
-return *earlier > version ? Status::superseded
+return *earlier >= version ? Status::superseded
control: a round needs one arrival more
-return status == Status::joined && filled + 1 == size;
+return status == Status::joined && filled == size;
"""
