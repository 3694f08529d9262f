"""The tables of `afflux reproduce` as data: a list of cells, each with a run for each seed, and the page of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from afflux.ops.errors import ConfigError
from afflux.rules.specs import parse_rule
from afflux.sim.papers import table_pages
from afflux.sim.papers.outcomes import Outcome
from afflux.sim.papers.publishing import Measure, Page
from afflux.sim.papers.table_pages import PageCell
from afflux.sim.results.finished_runs import Job
from afflux.sim.workload.config import SimConfig

# ---- MF-CA2FL (section 5) at 8, 4, 2 and 1 bits beside CA2FL, for every codec ---------------------------------------

#: The first one is the reference for the others. All have the server_lr that was picked for CA2FL.
CODEC_RULES = (
    "ca2fl",
    *(f"mf_ca2fl:bits={bits}:codec={codec}" for codec in ("affine", "affine-vector") for bits in (8, 4, 2, 1)),
    *(f"mf_ca2fl:bits={bits}:codec=rotated" for bits in (4, 2, 1)),
)
#: Model, arrivals, arrivals between evaluations.
CODEC_SETTINGS = {"digits": ("cnn", 1600, 40), "mnist": ("wkafl-cnn", 600, 100)}
CODEC_OPTIONS = {"buffer_size": 10, "server_lr": 0.6}


class PageTable(NamedTuple):
    """The cells of a table, and the function that makes its page."""

    cells: list[PageCell]
    make_page: Callable[[Sequence[PageCell], Sequence[Sequence[Outcome]], Sequence[int]], Page]

    def jobs(self, seeds: Sequence[int]) -> list[Job]:
        """Return the runs, seed by seed, cell by cell."""
        return [Job(cell.spec, seed, config=cell.config) for seed in seeds for cell in self.cells]

    def page(self, outcomes: Sequence[Outcome], seeds: Sequence[int]) -> Page:
        """Make the page from the outcomes of `jobs`."""
        runs = [outcomes[place :: len(self.cells)] for place in range(len(self.cells))]
        return self.make_page(self.cells, runs, seeds)

    def reproduce(self, seeds: Sequence[int], measure: Measure) -> Page:
        """Make all runs, and the page."""
        return self.page(measure(self.jobs(seeds)), seeds)


def mf_ca2fl(data: str, data_dir: str | None = None) -> PageTable:
    """Return the table of all codecs; raise ConfigError for an unknown data set."""
    model, arrivals, every = _settings(CODEC_SETTINGS, data, "MF-CA2FL is run on")
    config = SimConfig(
        data=data, data_dir=data_dir, model=model, arrivals=arrivals, eval_every=every, delays="fadas-large"
    )
    cells = [PageCell(rule, "", parse_rule(rule, CODEC_OPTIONS), config) for rule in CODEC_RULES]
    return PageTable(cells, table_pages.codecs_page)


def _settings(settings: dict[str, Any], data: str, what: str) -> Any:
    if data not in settings:
        raise ConfigError(f"data is {data!r}; {what} {', '.join(settings)}")
    return settings[data]
