"""Formats of clients' cached vectors, for `Calibrate.codec` and `ops.encode`. Bytes: docs/reference/codecs.md.

============================  =================  =====================================================
codec                         bytes per element  a value becomes
============================  =================  =====================================================
float32, float64              4, 8               itself
float16, bfloat16             2                  the nearest finite value
affine(8, 4, 2 or 1)          bits/8 + 1/16      one of 2^bits points from min to max of its block of
                                                 128, drawn at random so that it is unbiased
affine(bits, scope="vector")  bits/8             the same with min and max of the whole vector
rotated(4, 2 or 1)            bits/8 + 1/32      the nearest level after a random rotation of 128
                                                 values, scaled so that it is unbiased over rotations
============================  =================  =====================================================

>>> affine(4)
codecs.affine(4)
>>> affine(2, scope="vector").row_bytes(1_000_000)
250112
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from afflux import _engine
from afflux.ops.errors import AffluxError
from afflux.ops.validation import MOST_ELEMENTS, as_int, as_text, brief, integer, known_names, one_of

__all__ = ["Codec", "affine", "bfloat16", "float16", "float32", "float64", "named", "rotated"]

Scope = Literal["block", "vector"]
#: What the names of codecs with random bits have in front of their bits.
FAMILIES = tuple(dict.fromkeys(name.rpartition("-")[0] for name, facts in _engine.CODECS.items() if facts[2]))
if TYPE_CHECKING:
    Name = str
    Family = str
else:
    Family = Literal[FAMILIES]
    #: Codecs by the names that rules and the command line use: a codec's `name`.
    Name = Literal[tuple(_engine.CODECS)]


@dataclass(frozen=True, slots=True)
class Codec:
    """A format of rows, by its name in the engine."""

    name: str

    def __post_init__(self) -> None:
        name = as_text(self.name)
        if name is None:
            raise AffluxError(f"[Codec] name is {brief(self.name)}, must be a str")
        if name not in _engine.CODECS:
            raise AffluxError(f"[codec] {brief(name)} is unknown; {known_names(name, _engine.CODECS)}")
        object.__setattr__(self, "name", name)

    @property
    def exact(self) -> bool:
        """Whether rows are the vectors themselves."""
        return self in (float32, float64)

    @property
    def keyed(self) -> bool:
        """Whether rows are encoded with random bits; such rows are uint8 and begin with a head."""
        return _engine.CODECS[self.name][2]

    @property
    def ranged(self) -> bool:
        """Whether the encoder needs the least and the largest element."""
        return _engine.CODECS[self.name][3]

    @property
    def run(self) -> int:
        """The number of elements that are encoded together; each run of a keyed codec has random bits of its own."""
        return _engine.CODECS[self.name][4]

    @property
    def coding(self) -> str:
        """The name without the bits: the same for all widths, such as "affine-vector"."""
        return self.name.removesuffix(f"-{self.bits}")

    @property
    def bits(self) -> int:
        """Bits of a stored element, without scales."""
        return _engine.CODECS[self.name][0]

    @property
    def row_dtype(self) -> str:
        """The dtype of rows in NumPy. Rows of bfloat16, which NumPy lacks, and rows with a head are bytes."""
        dtype = _engine.CODECS[self.name][1]
        return "uint8" if dtype == "bfloat16" else dtype

    def row_bytes(self, size: int) -> int:
        """Return the bytes of a row of `size` elements."""
        return _engine.row_bytes(self.name, _a_size("row_bytes", "size", size))

    def row_size(self, size: int) -> int:
        """Return the number of elements, of type `row_dtype`, in the row of a vector of `size` elements."""
        return self.row_bytes(size) // np.dtype(self.row_dtype).itemsize

    def __repr__(self) -> str:
        kind, *_, bits = self.name.split("-") if self.keyed else (self.name, "")
        scope = ", scope='vector'" if self.ranged else ""
        return f"codecs.{kind}({bits}{scope})" if bits else f"codecs.{kind}"


float32 = Codec("float32")  #: 4 bytes per element
float64 = Codec("float64")  #: 8 bytes per element
float16 = Codec("float16")  #: 2 bytes per element
bfloat16 = Codec("bfloat16")  #: 2 bytes per element
#: The codecs that round, in the order of the engine's table.
ROUNDING = tuple(codec for name in _engine.CODECS if not (codec := Codec(name)).exact)


def affine(bits: int, *, scope: Scope = "block") -> Codec:
    """Return a codec with 2^bits points from min to max and stochastic rounding, which is unbiased for each element.

    Args:
        bits: 8, 4, 2 or 1.
        scope: min and max of each block of 128 elements, or of the whole vector, as in the literature.
    """
    one_of("block", "vector")("affine", "scope", scope)
    return of_family("affine-vector" if scope == "vector" else "affine", bits)


def rotated(bits: int) -> Codec:
    """Return a codec with 2^bits levels of a normal variable, after random signs and a Hadamard transform of 128 values
    at a time (similar to DRIVE and EDEN, Vargaftik et al. 2021, 2022). Its error is the smallest for few bits.

    Args:
        bits: 4, 2 or 1.
    """
    return of_family("rotated", bits)


def of_family(family: Family, bits: int) -> Codec:
    """Return the codec of a family in `FAMILIES` with this many bits.

    >>> of_family("affine-vector", 2)
    codecs.affine(2, scope='vector')
    """
    widths = [width for name, (width, *_) in _engine.CODECS.items() if name.rpartition("-")[0] == family]
    width = as_int(bits)
    if width not in widths:
        raise AffluxError(f"[{family}] bits is {brief(bits)}, must be one of {', '.join(map(str, widths))}")
    return Codec(f"{family}-{width}")


@overload
def named(codec: Codec | Name) -> Codec: ...
@overload
def named(codec: Codec | Name | None) -> Codec | None: ...
def named(codec: Codec | Name | None) -> Codec | None:
    """Return the codec of a name; a codec, or None, is returned unchanged.

    >>> named("rotated-2"), named(None)
    (codecs.rotated(2), None)
    """
    if isinstance(codec, Codec | None):
        return codec
    if isinstance(codec, str):
        return Codec(codec)
    raise AffluxError(f"[codec] codec is {brief(codec)}, must be one of afflux.codecs or the name of one")


_a_size = integer(0, MOST_ELEMENTS)
