"""Charts as SVG elements for the page: lines with bands. Colours and frames are those of the template."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

from afflux.sim.results.curves import MOST_MARKERS, series_style

WIDTH, HEIGHT = 400, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 20, 12, 42
LINEAR_BELOW = 0.01  #: the share below which a share axis is linear


class Series(NamedTuple):
    """One or more lines of a chart that have one colour, and perhaps a band."""

    label: str
    number: int  #: chooses colour and dashes
    lines: list[list[tuple[float, float]]]
    band: Sequence[tuple[float, float, float]] = ()  #: (x, low, high)


class Axis(NamedTuple):
    """The scale of an axis: `place` maps the values from `ticks[0]` to `ticks[-1]` to 0 to 1."""

    title: str
    ticks: list[tuple[float, str]]
    place: Callable[[float], float]


class Chart(NamedTuple):
    """A chart, whose frame the template of the page draws."""

    title: str
    across: str  #: title of the horizontal axis
    up: str
    rows: list[tuple[float, str]]  #: heights and names of the horizontal lines
    columns: list[tuple[float, str]]  #: places and names below the horizontal axis
    shapes: Markup  #: lines, bands and markers


def linear_axis(title: str, low: float, high: float) -> Axis:
    """Return an axis with about five round ticks that cover low to high."""
    found = [float(tick) for tick in MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)]
    first, last = found[0], found[-1]
    return Axis(title, [(tick, f"{tick:g}") for tick in found], lambda value: (value - first) / (last - first))


def percent_axis(title: str) -> Axis:
    """Return an axis from 0 to 100%."""
    return Axis(title, [(k / 5, f"{20 * k}%") for k in range(6)], lambda value: value)


def share_axis(title: str) -> Axis:
    """Return an axis of shares, logarithmic from 1% on and linear below."""

    def place(value: float) -> float:
        return 0.25 * value / LINEAR_BELOW if value < LINEAR_BELOW else 0.25 + 0.375 * math.log10(value / LINEAR_BELOW)

    return Axis(title, [(0, "0"), (0.01, "1%"), (0.1, "10%"), (1, "100%")], place)


def logarithmic_axis(title: str, high: float) -> Axis:
    """Return an axis of counts from 0 on, log(1 + x)."""
    powers = [0.0, *(10.0**power for power in range(1 + math.ceil(math.log10(max(high, 10)))))]
    largest = math.log1p(powers[-1])
    return Axis(title, [(tick, f"{tick:g}") for tick in powers], lambda value: math.log1p(value) / largest)


def category_axis(title: str, names: Sequence[str]) -> Axis:
    """Return an axis whose value k is the middle of the k-th of the names."""
    return Axis(title, list(enumerate(names)), lambda value: (value + 0.5) / len(names))


def style(shape: str, index: int) -> Markup:
    """Return the class of a shape in the colour of a series, and the dashes of a line."""
    colour, dashes, _ = series_style(index)
    drawn = f' stroke-dasharray="{" ".join(map(str, dashes))}"' if dashes and shape == "line" else ""
    return Markup(f'class="{shape} c{colour}"{drawn}')


def marker(index: int, x: float, y: float, plain: float = 0.0) -> Markup:
    """Return the marker of a series at a point; `plain` is the radius of the dot of a series without a marker."""
    kind, dot = series_style(index).marker, style("dot", index)
    if kind == "s":
        return Markup(f'<rect {dot} x="{x - 2.5:.1f}" y="{y - 2.5:.1f}" width="5" height="5"/>')
    if kind == "^":
        return Markup(f'<path {dot} d="M{x:.1f} {y - 3.5:.1f}l3.5 6h-7z"/>')
    radius = 2.8 if kind else plain
    return Markup(f'<circle {dot} cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' if radius else "")


def line_chart(
    title: str, across: Axis, up: Axis, series: Sequence[Series], level: float | None = None, points: bool = False
) -> Chart:
    """Return a chart of lines.

    Args:
        title: what the chart shows.
        across: the horizontal axis.
        up: the vertical axis.
        series: points with a value that is not finite are left out.
        level: height of a dotted line, such as a target.
        points: whether each point has a dot or a marker; else a few have a marker.
    """
    parts = []
    if level is not None:
        y = _y(up, level)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
    for one in series:
        if one.band:
            upper = [_point(across, up, x, high) for x, _, high in one.band]
            lower = [_point(across, up, x, low) for x, low, _ in reversed(one.band)]
            parts.append(f'<polygon {style("band", one.number)} points="{" ".join(upper + lower)}"/>')
    for one in series:
        line_style, inner = style("line", one.number), f"<title>{escape(one.label)}</title>"
        for line in one.lines:
            places = [(_x(across, x), _y(up, y)) for x, y in line if math.isfinite(x) and math.isfinite(y)]
            corners = " ".join(f"{x},{y}" for x, y in places)
            parts.append(f'<polyline {line_style} points="{corners}">{inner}</polyline>')
            every = 1 if points else len(places) // MOST_MARKERS + 1
            parts += (marker(one.number, *place, plain=1.5 * points) for place in places[::every])
    return _chart(title, across, up, parts)


class Interval(NamedTuple):
    """A small picture of an interval around a mean: places from 4 to 136, with 0 at 70."""

    mean: str
    whisker: tuple[str, str] | None  #: None: an end is not finite


def interval(mean: float, low: float, high: float, largest: float) -> Interval:
    """Return the picture of an interval on a scale from -largest to largest."""

    def place(value: float) -> str:
        share = max(-1.0, min(1.0, value / largest)) if largest else 0.0
        return f"{70 + 66 * share:.1f}"

    ends = (place(low), place(high)) if math.isfinite(low) and math.isfinite(high) else None
    return Interval(place(mean), ends)


def _x(axis: Axis, value: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * axis.place(value), 1)


def _y(axis: Axis, value: float) -> float:
    share = min(max(axis.place(value), 0.0), 1.0)
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)


def _point(across: Axis, up: Axis, x: float, y: float) -> str:
    return f"{_x(across, x)},{_y(up, y)}"


def _chart(title: str, across: Axis, up: Axis, shapes: list[str]) -> Chart:
    columns: list[tuple[float, str]] = []
    end = -math.inf
    for value, name in across.ticks:
        x = _x(across, value)
        if x - end >= 6.5 * len(name) + 6:  # names must not overlap
            columns.append((x, name))
            end = x
    rows = [(_y(up, value), name) for value, name in up.ticks]
    return Chart(title, across.title, up.title, rows, columns, Markup("".join(shapes)))
