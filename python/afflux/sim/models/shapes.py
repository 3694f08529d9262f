"""Shapes of one example, and the check of the sizes of images."""

from typing import TypeAlias

from afflux.sim.errors import ConfigError

Shape: TypeAlias = tuple[int, ...]
"""(channels, height, width) of an image, or (window,) of a text."""


def image_shape(model: str, shape: Shape, least: int) -> tuple[int, int, int]:
    """Return channels, height and width; raise ConfigError unless each side of the image has `least` pixels or more.

    Args:
        model: name, for the error.
        shape: of one example.
        least: height and width that the layers need.
    """
    if len(shape) != 3:
        raise ConfigError(f"model {model!r} needs images (channels, height, width), not examples of shape {shape}")
    channels, height, width = shape
    if min(height, width) < least:
        raise ConfigError(f"model {model!r} needs images of {least}x{least} pixels or more, not {height}x{width}")
    return channels, height, width
