"""One rule's server behind a stream of arrivals: in a run, beside another rule's, or after it from a log."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from afflux import __version__
from afflux.aggregation.reports import Pulled, Receipt
from afflux.rules.rule import Rule
from afflux.server.server import Server
from afflux.sim import audit
from afflux.sim.clients import as_kind
from afflux.sim.config import RuleSpec
from afflux.sim.errors import ConfigError, DivergedError
from afflux.sim.result import Row, RunResult, sha256
from afflux.sim.streams import Purpose, stream
from afflux.sim.validation import Validation, wants
from afflux.sim.world import World

Progress = Callable[[int], None]
"""Called after each arrival with the number of arrivals so far; may raise to stop the run."""


class Pull(NamedTuple):
    """A client pulls the model and starts training: dispatch number `sequence`."""

    sequence: int
    after: int  #: which model: that of after so many arrivals
    oldest: int  #: no client will pull an older one


class Finished(NamedTuple):
    """The result of dispatch number `sequence`, the same for every rule that follows the stream."""

    number: int  #: arrivals before it
    sequence: int
    dispatched_after: int  #: `Pull.after`
    client: int
    time: float
    update: np.ndarray  #: (d,) float32, trained - pulled params
    num_examples: int
    loss: float
    steps: int


def follow(events: Iterable[Pull | Finished], followers: "Sequence[Follower]", progress: Progress) -> None:
    """Let all followers see the stream, event by event: a client pulls from each of them, each at its own version."""
    for event in events:
        if isinstance(event, Pull):
            for follower in followers:
                follower.pull(event)
            continue
        for follower in followers:
            follower.arrive(event)
        progress(event.number + 1)


@dataclass(slots=True)
class History:
    """What a server has shown so far, as JSON has it."""

    rows: list[Row]
    staleness: list[int] = field(default_factory=list)  #: of each arrival
    round_staleness: list[int] = field(default_factory=list)  #: the largest one of each round
    seconds: list[float] = field(default_factory=list)  #: of each round

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "History":
        """From `asdict`, perhaps through JSON."""
        return cls(**{**content, "rows": [Row(*row) for row in content["rows"]]})


class Follower:
    """A server of one rule, what it made of a stream, and its log."""

    def __init__(
        self,
        spec: RuleSpec,
        world: World,
        arrivals: int,
        leader: str = "",
        serve: Callable[[Rule], Server] | None = None,
        history: History | None = None,
    ) -> None:
        """Make the server, by `serve` or in memory.

        `leader` is the label of the rule whose params the clients train from, if another's; `history` is that of the
        server that `serve` gives, if it has one.
        """
        self.spec = spec
        self.leader = leader
        self._world = world
        self._total = arrivals
        rule = spec.build()
        if arrivals < rule.buffer_size:
            raise ConfigError(f"arrivals is {arrivals}, but {spec.label} steps after {rule.buffer_size}")
        self.server = (serve or world.server)(rule)
        self._validation = None
        if wants(rule):
            config, rng = world.config, stream(world.seed, Purpose.VALIDATION)
            self._validation = Validation(
                self.server, world.trainer, world.num_train, config.validation, config.refresh_every, rng
            )
        self.log: audit.Writer | None = None
        self.history = history or History([Row(0, 0, 0.0, *world.trainer.evaluate(self.server.params))])
        self._models: dict[int, Pulled] = {}
        self._pulled: dict[int, Pulled] = {}

    def hold(self, models: dict[int, Pulled], pulled: dict[int, Pulled]) -> None:
        """Go on with models that may still be pulled, by the arrivals before them, and that were, by dispatch."""
        self._models, self._pulled = models, pulled

    def pull(self, event: Pull) -> None:
        """Hold the version that the client of this dispatch pulls."""
        self._models[len(self.history.staleness)] = self.server.pull()
        self._models = {after: model for after, model in self._models.items() if after >= event.oldest}
        self._pulled[event.sequence] = self._models[event.after]

    def arrive(self, done: Finished) -> None:
        """Push one arrival, as the kind that the rule takes."""
        start = self._pulled.pop(done.sequence)
        vector = as_kind(done.update, self.server.rule.kind, start.params, self._world.config.client_lr, done.steps)
        if not (math.isfinite(done.loss) and np.isfinite(vector).all()):
            raise DivergedError(
                f"{self.spec.label}, seed {self._world.seed}: client {done.client} diverged at arrival "
                f"{done.number + 1} (loss {done.loss:g}); lower client_lr or server_lr"
            )
        receipt = self.server.push(
            done.client, vector, version=start.version, num_examples=done.num_examples, loss=done.loss
        )
        if self._validation is not None:
            self._validation.refresh()
        history = self.history
        history.staleness.append(receipt.staleness)
        if receipt.report is not None:
            history.round_staleness.append(int(np.max(receipt.report.staleness)))
            history.seconds.append(receipt.report.seconds)
        if self.log is not None:
            self._write(self.log, done, start.version, receipt)
        arrivals = done.number + 1
        if arrivals % self._world.config.eval_every == 0 or arrivals == self._total:
            history.rows.append(self._evaluated(arrivals, done.time))

    def result(self) -> RunResult:
        """What the run leaves behind; the log gets its end line."""
        history = self.history
        result = RunResult(
            spec=self.spec,
            seed=self._world.seed,
            rows=tuple(history.rows),
            staleness=np.array(history.staleness, dtype=np.int64),
            round_staleness=np.array(history.round_staleness, dtype=np.int64),
            server_seconds=np.array(history.seconds),
            state_bytes=self.server.state_bytes,
            num_clients=len(self._world.clients),
            params=np.array(self.server.params),
            leader=self.leader,
        )
        if self.log is not None:
            self.log.write(audit.EndLine(len(history.staleness), self.server.version, result.digest))
        return result

    def header(self, updates: str | None) -> audit.Header:
        """The first line of this rule's log; `updates` names the file of the kept updates."""
        world, rule = self._world, self.server.rule
        return audit.Header(
            format=audit.FORMAT,
            format_version=audit.FORMAT_VERSION,
            afflux=__version__,
            label=self.spec.label,
            rule=self.spec.name,
            options=self.spec.plain_options(),
            kind=rule.kind,
            buffer_size=rule.buffer_size,
            d=len(world.first),
            seed=world.seed,
            num_clients=len(world.clients),
            client_lr=world.config.client_lr,
            leader=self.leader or self.spec.label,
            updates=updates,
            first_params_sha256=sha256(world.first),
            config=asdict(world.config),
        )

    def _write(self, log: audit.Writer, done: Finished, version: int, receipt: Receipt) -> None:
        log.write(
            audit.ArrivalLine(
                number=done.number,
                client=done.client,
                dispatched_after=done.dispatched_after,
                version=version,
                staleness=receipt.staleness,
                examples=done.num_examples,
                loss=done.loss,
                steps=done.steps,
                status=receipt.status,
                time=done.time,
                update=done.number if log.header.updates is not None else None,
            )
        )
        if receipt.report is not None:
            log.report(receipt.report)

    def _evaluated(self, arrivals: int, time: float) -> Row:
        # The model did not change since the last row if the version did not.
        last = self.history.rows[-1]
        if self.server.version == last.version:
            return last._replace(arrivals=arrivals, virtual_time=time)
        return Row(arrivals, self.server.version, time, *self._world.trainer.evaluate(self.server.params))
