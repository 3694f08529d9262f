"""The stream of clients that train from the params of one rule, and its state between two events."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from afflux.aggregation.reports import Pulled
from afflux.sim import ctrl_c
from afflux.sim.broadcast import Broadcast, Sent
from afflux.sim.errors import ConfigError
from afflux.sim.events import Arrival, Dispatch
from afflux.sim.follow import Finished, Follower, Pull
from afflux.sim.streams import Purpose, stream
from afflux.sim.world import World


class Live:
    """Clients train from the params of `lead`, which follows the stream."""

    def __init__(self, world: World, lead: Follower) -> None:
        self._world = world
        self._lead = lead
        self._broadcast = Broadcast(lead.server, world.config, len(world.clients), world.seed)
        self._training: dict[int, Sent] = {}
        self._events = 0
        self._arrivals = 0

    def stream(self, between: Callable[[], None] = ctrl_c.check) -> Iterator[Pull | Finished]:
        """Yield what happens from now on; `between` is called after each event that was dealt with."""
        for event in self._schedule():
            client, sequence, number = event.client, event.sequence, self._arrivals
            if isinstance(event, Dispatch):
                start = self._training[sequence] = self._broadcast.pull(client, event.age, number)
                yield Pull(sequence, start.after, self._broadcast.oldest)
            else:
                start = self._training.pop(sequence)
                batches = stream(self._world.seed, Purpose.BATCHES, sequence)
                trained = self._world.trainer.train(client, start.model.params, "update", batches, start.shift)
                facts = (trained.update, trained.num_examples, trained.loss, trained.steps)
                yield Finished(number, sequence, start.after, client, event.time, *facts)
                self._broadcast.finished(start, trained)
                self._arrivals += 1
            self._events += 1
            between()

    def _schedule(self) -> Iterator[Dispatch | Arrival]:
        """The events from now on. Those before are drawn again: they depend on the seed alone, not on models."""
        events = self._world.events(self._lead.spec)
        training: dict[int, int] = {}
        for event in islice(events, self._events):
            if isinstance(event, Dispatch):
                training[event.sequence] = event.client
            else:
                del training[event.sequence]
        if training != {sequence: sent.client for sequence, sent in self._training.items()}:
            raise ConfigError("other clients train than in the run that was interrupted: another NumPy has made it")
        return events

    def facts(self) -> dict[str, Any]:
        """The state, as JSON has it, but for `arrays`; a version of params is named by its number."""
        training = [
            (sequence, sent.client, sent.model.version, sent.after) for sequence, sent in self._training.items()
        ]
        return {
            "events": self._events,
            "arrivals": self._arrivals,
            "training": training,
            "models": [(model.version, after) for model, _, after in self._broadcast.models],
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """What SCAFFOLD adds to the state; nothing with other client optimizers."""
        shifts = [sent.shift for sent in self._training.values() if sent.shift is not None]
        arrays = self._broadcast.arrays()
        return arrays | {"shifts": np.stack(shifts)} if shifts else arrays

    def older(self) -> list[Pulled]:
        """The versions of params that the state names, but for the newest one."""
        models = [sent.model for sent in self._training.values()]
        models += [model for model, _, _ in self._broadcast.models]
        held = {model.version: model for model in models if model.version != self._lead.server.version}
        return list(held.values())

    def load(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], versions: Mapping[int, Pulled]) -> None:
        """Go on from a state, with the versions that it names; `lead` then holds what its clients have pulled."""
        named = {version for _, _, version, _ in facts["training"]} | {version for version, _ in facts["models"]}
        if lost := sorted(named - versions.keys()):
            raise ConfigError(f"the store no longer keeps version {lost[0]} of params, from which clients train")
        self._events, self._arrivals = facts["events"], facts["arrivals"]
        shifts = iter(arrays.get("shifts", ()))
        for sequence, client, version, after in facts["training"]:
            self._training[sequence] = Sent(client, versions[version], next(shifts, None), after)
        self._broadcast.load([(versions[version], after) for version, after in facts["models"]], arrays)
        models = {after: model for model, _, after in self._broadcast.models}
        self._lead.hold(models, {sequence: sent.model for sequence, sent in self._training.items()})
