"""MF-CA2FL: the cached difference, with rows that are encoded again in place: one row of the benchmark per codec."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from afflux.ops import codecs
from afflux.ops.codecs import Codec
from bench.measure.timing import CHECKED
from bench.rows import ca2fl
from bench.spec.columns import TIMED, Column
from bench.spec.contender import Contender, compiled, ends, ours, plain
from bench.spec.inputs import LR, Inputs
from bench.spec.optional_torch import Formula, Tensor, torch
from bench.spec.row import Row

# torch: codes of one byte each, and one scale for a whole vector, as in the literature


class Coder:
    """A coder of rows: as float16, or as codes from 0 to `levels` with the least value and the step of each row."""

    of: Any = torch

    def __init__(self, bits: int, nearest: bool = False) -> None:
        self.halves, self.levels, self.nearest = bits == 16, 2**bits - 1, nearest

    def encode(self, update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = update.min(), update.max()
        if self.halves:
            return self.cast(update, "float16"), low, high
        step = (high - low) / self.levels
        place = (update - low) / step
        place = self.of.round(place) if self.nearest else self.of.floor(place + self.uniform(place))
        return self.cast(self.of.clip(place, 0, self.levels), "uint8"), low, step

    def decode(self, codes: Tensor, low: Tensor, step: Tensor) -> Tensor:
        return self.cast(codes, "float32") if self.halves else low + step * codes

    def cast(self, array: Tensor, dtype: str) -> Tensor:
        return array.to(getattr(torch, dtype))

    def uniform(self, like: Tensor) -> Tensor:
        return torch.rand_like(like)


class CuPyCoder(Coder):
    """The same coder with CuPy's functions, which have NumPy's names."""

    def __init__(self, bits: int) -> None:
        import cupy

        super().__init__(bits)
        self.of, self._random = cupy, cupy.random.default_rng(0)

    def cast(self, array: Tensor, dtype: str) -> Tensor:
        return array.astype(dtype)

    def uniform(self, like: Tensor) -> Tensor:
        return self._random.random(like.shape, dtype="float32")


def client_by_client(made: Callable[[], Coder]) -> ca2fl.Prepare:
    """Return a function that prepares the round, client by client, as the paper writes it, on encoded rows."""

    def prepare(inputs: Inputs, updates: list[Tensor], convert: Formula) -> ca2fl.Prepared:
        coder = made()
        rows = [list(coder.encode(update)) for update in updates[-1]]
        h = sum(coder.decode(*row) for row in rows) / inputs.num_clients

        def formula(params: Tensor, updates: Tensor, rows: list[list[Tensor]], h: Tensor, num_clients: int) -> Tensor:
            total, change = coder.of.zeros_like(params), coder.of.zeros_like(params)
            for update, row in zip(updates, rows, strict=True):
                old, new = coder.decode(*row), coder.encode(update)
                total += update - old
                change += coder.decode(*new) - old
                for part, value in zip(row, new, strict=True):
                    part[...] = value
            new_params = params + LR * (h + total / len(updates))
            h += change / num_clients
            return new_params

        return formula, rows, h, lambda: {"rows": np.array([ends(coder.decode(*row), CHECKED) for row in rows]), "h": h}

    return prepare


def baselines(bits: int) -> list[Contender]:
    row_bytes = 2 if bits == 16 else 1

    def vectors(m: int) -> float:
        return row_bytes * m / 4 + 1

    def round_of(nearest: bool = False, compiles: bool = False) -> Any:
        return ca2fl.cached(client_by_client(partial(Coder, bits, nearest)), compiles=compiles)

    one_scale = "float32 h" if bits == 16 else "one scale a vector; codes of a byte; float32 h"
    contenders = [
        plain(
            "torch, client by client",
            f"min, max, stochastic rounding, total += u - row, eager; {one_scale}",
            round_of(),
            vectors,
            9,
        ),
        compiled(f"the same, compiled; {one_scale}", round_of(compiles=True), vectors, 3),
        compiled(
            f"without random numbers, compiled; {one_scale}",
            round_of(nearest=True, compiles=True),
            vectors,
            3,
            caveat="biased rows; float32 sums",
            name="torch.compile, to nearest",
        ),
    ]
    return contenders if bits != 16 else contenders[:2]  # nothing to round


def stored(line: dict[str, Any]) -> str:
    return format(line["errors"]["rows"]["abs"], ".1e") if line["errors"] else ""


def row(codec: Codec, bits: int) -> Row:
    return Row(
        name=f"mf-ca2fl-{codec.name}",
        formula="v = h + 1/M sum_i (u_i - h_i), out = params + lr v, h_i = Q(u_i)",
        counted=f"4 d (M + 2) + 16 d + 2 M rows of {ca2fl.row_bytes(codec):g} d: M updates and params read, out "
        "written, the rows and the float64 sum read and written",
        traffic=ca2fl.traffic(codec),
        reference=ca2fl.reference,
        contenders=[
            ours(
                "afflux",
                f"ops.apply, {codec.name} rows in place, float64 sum",
                ca2fl.afflux_round(codec),
                kept=lambda m: m * ca2fl.row_bytes(codec) / 4 + 3,
            ),
            *baselines(bits),
        ],
        columns=(*TIMED, Column("|Q(u) - u|", stored)),
    )


#: The codecs, and the bits of the baselines' codes for each.
CODECS = {codecs.affine(8): 8, codecs.affine(4): 4, codecs.rotated(2): 2, codecs.float16: 16}

MF_CA2FL = [row(codec, bits) for codec, bits in CODECS.items()]
