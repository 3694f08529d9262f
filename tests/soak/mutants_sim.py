"""What `mutants.py` breaks in the simulator and in the adapters to other frameworks."""

SIM = """
test_sim_events.py
schedule: replacements start one by one
- - busy - done % refill
+ - busy
schedule: the client that has finished last is never drawn again
-int(stream.integers(len(idle)))
+int(stream.integers(max(len(idle) - 1, 1)))
schedule: arrivals at the same time come in any order
-heappush(ends, (finish, sequence, client, now))
+heappush(ends, (finish, 10**6 - sequence, client, now))
schedule: one arrival too many
-while done < arrivals:
+while done <= arrivals:

test_presence.py
presence: a client that is away is dispatched
-(ready := draws.ready(client, now)) > now:
+(ready := draws.ready(client, now)) > now + 1e9:
presence: the place of a dropout is never free
-                if finish < inf:
+                if finish < 0:
presence: clients train on while they are away
-now + duration if self.trace is None else
+now + duration if True else
selection: a resumed run forgets its results
-self._selection.observe(ClientResult.of(event, next(results)))
+next(results)

test_sim_rounds.py
rounds: the arrivals of a round come in the order of dispatch
-key=lambda arrival: (arrival.time, arrival.sequence)
+key=lambda arrival: arrival.sequence
rounds: a client starts from any of the held models but the newest
-ages.integers(min(stale_models, number + 1))
+ages.integers(min(1, number), min(stale_models, number + 1) + (number == 0))
rounds: the rarest client is drawn most often
-selection.standard_exponential(len(clients)) / rates
+selection.standard_exponential(len(clients)) * rates

test_sim_data.py
streams: selection and delays share a stream
-    SELECTION = 3
+    SELECTION = 2
partition: Dirichlet's last client loses examples
-np.rint(np.cumsum(shares) * len(members))
+np.floor(np.cumsum(shares) * len(members))
partition: iid shares are blocks of the file
-    shuffled = rng.permutation(len(labels))
+    shuffled = np.arange(len(labels))
partition: classes are drawn without regard to those that have no client
-np.lexsort((rng.random(len(kinds)), taken))
+np.argsort(rng.random(len(kinds)))

test_delay_laws.py
delays: FADAS's large class is as frequent as the small one
-(3 * gamma, 2 * gamma, gamma)
+(gamma, 2 * gamma, 3 * gamma)
delays: CA2FL's location is a scale
-float(s[client] + abs(times.standard_normal()))
+float(s[client] * abs(times.standard_normal()))

test_sim_clients.py
training: a small last batch weighs as much as a full one
-total += loss * length
+total += loss * self._config.batch_size
training: an epoch without its last batch
-max(1, int(batches)) if config.drop_last else math.ceil(batches)
+max(1, int(batches))

test_sim_local.py
training: the number of steps is never the largest
-rng.integers(1, 2 * config.local_steps, endpoint=True)
+rng.integers(1, 2 * config.local_steps)
training: a client reports its data in place of its batch
-min(size, config.batch_size) if config.examples == "batch" else size
+size
scaffold: the control of a client is the gradient of its loss alone
-= gradient - shift
+= gradient

test_gpu_clients.py
graphs: a batch is that of the recorded step
-in zip(inputs, leaves, strict=True):
+in zip(inputs, inputs, strict=True):
graphs: all losses are the last one
-[replay().clone()]
+[replay()]
graphs: other bits are accepted
-if all(map(same_bits, state(replay()), expected)) else
+if state(replay()) else
graphs: a run records any number of shapes
-if shapes >= self._most:
+if shapes > self._most + 9:
graphs: a shift is that of the first training
-own_shift.copy_(torch.from_numpy(shift))
+own_shift = torch.from_numpy(shift)
graphs: a proximal term pulls to the model of the first training
-start.copy_(self._model.flat)
+start = self._model.flat.clone()
clients on a GPU: examples fill its memory
-free - size >= total / 2
+free - size >= 0
clients on a GPU: images are cropped by the numbers of another batch
-top, left, flip = torch.randint(0, 2 * crops, (len(places), 3)).to(device).unbind(1)
+top, left, flip = torch.randint(0, 2 * crops, (3, len(places))).to(device)

test_faulty_trainings.py
scaffold: a faulty training changes the control
- and np.isfinite(trained.update).all()
faults: any arrival after a faulty one is in its row
-if status == "faulty" else 0
+if status == "faulty" else self.faults_in_a_row

test_sim_run.py
evaluations: never at the last arrival alone
-eval_every == 0 or
+eval_every == 0 or 0 *

test_library.py
ends: one round too many
-0 < self.rounds <= version
+0 < self.rounds < version

test_sim_progress.py
ends: an arrival at the end of virtual time is too late
-0 < config.virtual_time < event.time
+0 < config.virtual_time <= event.time

test_sim_statistics.py
ends: a target is not reached with equal accuracy
-if reaches(evaluation.score, target)
+if evaluation.score > target
statistics: the deviation of all, not of a sample
-np.std(finite, ddof=1)
+np.std(finite)
statistics: a staleness of 2 is in the bin of 1
-late.bit_length()
+late.bit_length() - (late == 2)
statistics: clients that never arrived are not unequal
-np.concatenate([np.zeros(max(num_clients - len(counts), 0), np.int64), counts])
+np.array(counts)
statistics: an interval of one side
-(1 + level) / 2
+level

test_sim_resume.py
checkpoint: older versions from which clients train are not kept
-keep=self._loop.older_versions()
+keep=[]
checkpoint: another interval
->= self._due
+> self._due + 60
resume: what a log holds beyond the checkpoint stays
-os.ftruncate(descriptor, size)
+pass

test_sim_audit.py
audit: a log that lacks an arrival is read
-if line.number != arrivals:
+if line.number < arrivals:

test_sim_report.py
tables: the columns of participation are exchanged
-_by_run(("client", "arrivals"),
+_by_run(("arrivals", "client"),
"""

ADAPTERS = """
test_core_clients.py
replies: an empty one is of use
-NO_USE = ("faulty", "expired", "empty")
+NO_USE = ("faulty", "expired")
replies: a slow client has failed
-receipt.status != "expired" or trained is None
+receipt.status != "never"
replies: one after the timeout joins
-self.note_duration(assigned.start) >= self.timeout and not
+self.note_duration(assigned.start) < 0 and not
clients: an overdue one is not counted
-self.lost["overdue"] += 1
+self.lost["overdue"] += 0
clients: all rest for the same time
-* 2 ** min(count - 1, _MOST_DOUBLINGS)

test_core_replies.py
replies: one without an assignment is not counted
-self.lost["unknown"] += 1
+self.lost["unknown"] += 0
replies: float16 holds any value
-"float16": (-65504.0, 65504.0)
+"float16": None

test_core_ids.py
clients: one that was restarted keeps its old address, too
-                del self._ids[other]
-            self._ids[address] = client
+            self._ids[address] = client

test_core_loop.py
clients: tasks before enough places are free
-if free < min(self.settings.dispatch_size, self.concurrency) or self.spent:
+if free <= 0 or self.spent:

test_adapter_rules.py
metrics: their weight is not read
-sum(x * w for x, w in own) / sum(w for _, w in own)
+sum(x for x, _ in own) / len(own)

test_core_metrics.py
metrics: those of a replaced arrival stay
-if receipt.status == "replaced":
+if False:

test_core_resume.py
resume: tasks of clients that are gone stay open
-            for task in self.server.tasks:
-                task.cancel()
"""
