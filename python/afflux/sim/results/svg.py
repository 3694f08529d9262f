"""Panels of figures as SVG elements for the page: lines with bands. Colours and frames are those of the template."""

from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from afflux.sim.results.curves import MOST_MARKERS, series_style
from afflux.sim.results.figures import SeriesLine

WIDTH, HEIGHT = 400, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 20, 12, 42
MOST_POINTS = 400  #: the most points of a line


class Chart(NamedTuple):
    """A chart, whose frame the template of the page draws."""

    title: str
    across: str  #: title of the horizontal axis
    up: str
    rows: list[tuple[float, str]]  #: heights and names of the horizontal lines
    columns: list[tuple[float, str]]  #: places and names below the horizontal axis
    shapes: Markup  #: lines, bands and markers


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


def new_axes() -> Axes:
    """Return axes of the size of a chart."""
    return Figure(figsize=(WIDTH / 72, HEIGHT / 72)).subplots()


def chart(title: str, axes: Axes) -> Chart:
    """Return a panel as a chart: its lines of series with their bands, and other lines, such as a target, dotted.

    Points with a value that is not finite are left out. A line that chooses no points for its markers has a dot or a
    marker at each one.
    """
    bands, levels, lines = list[str](), list[str](), list[str]()
    for line in axes.lines:
        x, y = map(np.asarray, line.get_data())
        if not isinstance(line, SeriesLine):
            height = _places(axes, [0, 1], y)[0][1]
            levels.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}"/>')
            continue
        if line.band is not None:
            low, high = (_places(axes, x, side) for side in line.band)
            bands.append(f'<polygon {style("band", line.index)} points="{_corners(high + low[::-1])}"/>')
        points, inner = _places(axes, x, y), f"<title>{escape(line.text)}</title>"
        lines.append(f'<polyline {style("line", line.index)} points="{_corners(points)}">{inner}</polyline>')
        plain, every = (1.5, 1) if line.get_markevery() is None else (0.0, len(points) // MOST_MARKERS + 1)
        lines += (marker(line.index, *point, plain) for point in points[::every])
    columns: list[tuple[float, str]] = []
    for tick, name in _ticks(axes.xaxis):
        place = _places(axes, [tick], axes.get_ylim()[:1])[0][0]
        if not columns or place - columns[-1][0] >= 6.5 * len(name) + 6:  # names must not overlap
            columns.append((place, name))
    rows = [(_places(axes, axes.get_xlim()[:1], [tick])[0][1], name) for tick, name in _ticks(axes.yaxis)]
    return Chart(title, axes.get_xlabel(), axes.get_ylabel(), rows, columns, Markup("".join(levels + bands + lines)))


def _places(axes: Axes, *columns: Any) -> list[tuple[float, float]]:
    """Return the places of points on the page, at most MOST_POINTS of them, with the first and the last one."""
    points = np.column_stack(columns).astype(float)
    if len(points) > MOST_POINTS:
        points = points[np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int)]
    shares = (axes.transScale + axes.transLimits).transform(points[np.isfinite(points).all(axis=1)]).clip(0, 1)
    size = np.array([WIDTH - LEFT - RIGHT, TOP + BOTTOM - HEIGHT])
    return [(x, y) for x, y in ((LEFT, HEIGHT - BOTTOM) + size * shares).round(1).tolist()]


def _corners(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _ticks(axis: Axis) -> list[tuple[float, str]]:
    """Return the ticks that are shown, and their names."""
    low, high = sorted(axis.get_view_interval())
    ticks, formatter = np.array(axis.get_majorticklocs()).tolist(), axis.get_major_formatter()
    numbers = isinstance(formatter, ScalarFormatter)  # which would write a common factor beside the axis
    names = [f"{tick:g}" for tick in ticks] if numbers else formatter.format_ticks(ticks)
    return [(tick, name) for tick, name in zip(ticks, names, strict=True) if low <= tick <= high]
