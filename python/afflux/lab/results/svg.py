"""Small pictures as SVG elements for the page: the lines of the legend, and intervals. Colours are the template's."""

import math
from typing import NamedTuple

from markupsafe import Markup

from afflux.lab.results.curves import series_style


def style(shape: str, index: int) -> Markup:
    """Return the class of a shape in the colour of a series, and the dashes of a line."""
    colour, dashes, _ = series_style(index)
    drawn = f' stroke-dasharray="{" ".join(map(str, dashes))}"' if dashes and shape == "line" else ""
    return Markup(f'class="{shape} c{colour}"{drawn}')


def marker(index: int, x: float, y: float) -> Markup:
    """Return the marker of a series at a point; empty for a series without one."""
    kind, dot = series_style(index).marker, style("dot", index)
    if kind == "s":
        return Markup(f'<rect {dot} x="{x - 2.5:.1f}" y="{y - 2.5:.1f}" width="5" height="5"/>')
    if kind == "^":
        return Markup(f'<path {dot} d="M{x:.1f} {y - 3.5:.1f}l3.5 6h-7z"/>')
    return Markup(f'<circle {dot} cx="{x:.1f}" cy="{y:.1f}" r="2.8"/>' if kind else "")


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
