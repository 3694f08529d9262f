"""Laws by which the server selects the next client among the idle ones: those of the setting selection."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from afflux.ops.errors import ConfigError
from afflux.ops.validation import as_int, brief
from afflux.rules.files import file_function, imports_beside, split_rule_name
from afflux.rules.rule import Rule
from afflux.rules.specs import read_options
from afflux.sim.errors import note_on_errors
from afflux.sim.workload.availability import read_law
from afflux.sim.workload.random_streams import StreamPurpose

#: The law for rules with gradient scheduling.
BLOCKED = "blocked-until-pass-ends"
#: Mean loss (None: not known, or not finite), steps, examples, and whether the training is faulty.
TrainingFacts: TypeAlias = tuple[float | None, int, int, bool]


class ClientResult(NamedTuple):
    """An arrival, as `observe` of a selection gets it."""

    client: int
    time: float  #: virtual time of the arrival
    duration: float  #: since the dispatch
    loss: float | None  #: mean loss of the training; None: not known, or not finite
    steps: int
    examples: int
    faulty: bool  #: the training has failed, or its loss or update is not finite

    @classmethod
    def of(cls, arrival: Any, trained: TrainingFacts) -> "ClientResult":
        """Return the result of an `Arrival` of the schedule."""
        return cls(arrival.client, arrival.time, arrival.time - arrival.dispatched, *trained)


class Population(NamedTuple):
    """The clients of a run."""

    num_clients: int  #: all of them
    clients: Sequence[int]  #: those that hold data
    examples: Sequence[int | None] = ()  #: the number of each client's examples; (): not known


@dataclass
class UniformSelection:
    """Each idle client has the same chance."""

    purpose: ClassVar[StreamPurpose] = StreamPurpose.SELECTION  #: of the stream from which the law draws
    observe: ClassVar[Any] = None  #: a method that is called with the `ClientResult` of each arrival, or None

    def begin(self, population: Population, stream: np.random.Generator) -> None:
        """Begin a run."""

    def place(self, idle: Sequence[int], now: float, stream: np.random.Generator) -> int:
        """Return the index in `idle`, which is not empty, of the next client."""
        return int(stream.integers(len(idle)))

    def add_idle(self, client: int, idle: list[int]) -> None:
        """Add a client whose result has arrived to `idle`."""
        idle.append(client)


@dataclass
class BlockedUntilPassEnds(UniformSelection):
    """A client whose result has arrived is idle again when those of all clients have, which ends the pass (GSGM)."""

    def begin(self, population: Population, stream: np.random.Generator) -> None:
        """Begin the first pass."""
        self._entered, self._count = list[int](), len(population.clients)

    def add_idle(self, client: int, idle: list[int]) -> None:
        """Add all clients if the pass has ended."""
        self._entered.append(client)
        if len(self._entered) == self._count:
            idle += self._entered
            self._entered.clear()


@dataclass
class ByExamples(UniformSelection):
    """The chance of an idle client is proportional to its number of examples."""

    purpose = StreamPurpose.SELECTION_LAW

    def begin(self, population: Population, stream: np.random.Generator) -> None:
        """Read the numbers of examples; raise ConfigError if one is not known."""
        if not population.examples or None in population.examples:
            raise ConfigError("selection examples needs clients whose data sets have a length, which is known at once")
        self._examples = np.array(population.examples)

    def place(self, idle: Sequence[int], now: float, stream: np.random.Generator) -> int:
        """Draw an example of all idle clients, and return the place of its client."""
        ends = np.cumsum(self._examples[list(idle)])
        return int(np.searchsorted(ends, stream.integers(ends[-1]), side="right"))


@dataclass
class OwnSelection(UniformSelection):
    """A law of the user, FILE.py:FUNCTION[:OPTION=VALUE...]: the function (number of clients, stream) returns it.

    `pick(idle, now, stream)` of the law returns one of the clients in the tuple `idle`; if that client is away, `pick`
    is called again without it. `observe(result)` is optional, and is called after each arrival.
    """

    purpose = StreamPurpose.SELECTION_LAW
    text: str

    def begin(self, population: Population, stream: np.random.Generator) -> None:
        """Execute the file and make the law; raise ConfigError if it has no `pick`."""
        name, assignments = split_rule_name(self.text)
        function, what = file_function(name, "selection"), f"selection {self.text}"
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())[2:]
        options = read_options(what, assignments, name, {one.name: one.annotation for one in parameters})
        with imports_beside(name), note_on_errors(f"while {what} was made"):
            law = function(population.num_clients, stream, **options)
        if not callable(getattr(law, "pick", None)):
            raise ConfigError(f"{what}: the law is {brief(law)}, must have a method pick(idle, now, stream)")
        self._pick, self.observe = law.pick, getattr(law, "observe", None)  # type: ignore[misc]
        if not (self.observe is None or callable(self.observe)):
            raise ConfigError(f"{what}: observe of the law is {brief(self.observe)}, must be a method (result)")

    def place(self, idle: Sequence[int], now: float, stream: np.random.Generator) -> int:
        """Ask the law."""
        with note_on_errors(f"while selection {self.text} picked a client"):
            picked = self._pick(tuple(idle), now, stream)
        if (client := as_int(picked)) is None or client not in idle:
            raise ConfigError(f"selection {self.text} picked {brief(picked)}, which is not one of the idle clients")
        return idle.index(client)


SELECTIONS: Mapping[str, tuple[type[UniformSelection], Mapping[str, Any]]] = {
    "uniform": (UniformSelection, {}),
    BLOCKED: (BlockedUntilPassEnds, {}),
    "examples": (ByExamples, {}),
}


def selection_law(text: str) -> UniformSelection:
    """Return a law that has not begun: a name of `SELECTIONS` with its options, or FILE.py:FUNCTION.

    Raises:
        ConfigError: an unknown name or option, or a value out of range. A file is read when the law begins.
    """
    own = text.partition(":")[0].endswith(".py")
    return OwnSelection(text) if own else read_law("selection", text, SELECTIONS)[0]


def check_participation(rule: Rule, selection: str, rounds: int) -> None:
    """Raise ConfigError if a rule takes each client once per pass, and the selection does not block a client; or if it
    takes a client in some rounds only, and the run ends after a number of rounds, which may never come.
    """
    if rule.needs.participations is not None and rounds:
        raise ConfigError(f"{rule.name} has participations, so that rounds={rounds} may never come: give arrivals")
    if rule.needs.passes and selection != BLOCKED:
        raise ConfigError(
            f"{rule.name} takes each client once per pass over all clients: give selection={BLOCKED} to all rules"
        )


def reads_results(text: str) -> bool:
    """Return whether a law may read results, so that each rule has its own dispatches; nothing is executed."""
    return isinstance(selection_law(text), OwnSelection)
