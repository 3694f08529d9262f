"""The walks of CONTRIBUTING.md, as a contributor makes them: what is inserted, and after which text.

test_walks.py checks that the files are those which CONTRIBUTING.md names, and that each text stands once. In soak it
makes the walks in a copy of the project, and runs the suite of what is new.
"""

from pathlib import Path
from typing import NamedTuple


class Walk(NamedTuple):
    """One walk: its section of CONTRIBUTING.md, and the files in the order of its steps."""

    section: str
    #: file: [(the text after which is inserted, what is inserted)]; "" makes a new file
    files: dict[str, list[tuple[str, str]]]
    #: the same in tests, oracles and pages
    tests: dict[str, list[tuple[str, str]]]


OPTIMIZER = Walk(
    "A new optimizer is three source files",
    {
        "engine/include/afflux/step.hpp": [
            ("  KIND(nesterov, 1, false)", " \\\n  KIND(signs, 0, false)"),
            ("//   assign    out = lr * d\n", "//   signs     out = params + lr * sign(d)\n"),
        ],
        "engine/formula/step.hpp": [
            ("      return yogi_square(v, direction, rest);\n    case StepKind::sgd:\n",
             "    case StepKind::signs:\n"),
            ("      return params + lanes.fill(step.lr) * direction;\n",
             "    case StepKind::signs:\n"
             "      return params + lanes.fill(step.lr) * sign(direction);\n"),
        ],
        "python/afflux/rules/optimizers.py": [
            ('        "assign": Reach(lambda step, d: d),\n', '        "signs": Reach(lambda step, d: 1.0),\n'),
            ('        return ops.Step("sgd", rate(self.lr, arrivals))\n',
             '\n\n@register("signs", "step")\nclass Signs(Sgd):\n'
             '    """params += lr sign(v). Keeps nothing."""\n\n'
             "    __slots__ = ()\n\n"
             "    def __call__(self, arrivals: Arrivals, /) -> ops.Step:\n"
             '        """See the class."""\n'
             '        return ops.Step("signs", rate(self.lr, arrivals))\n'),
        ],
    },
    {
        "tests/oracle/oracle.py": [
            ("        new, move = [], d\n", '    elif kind == "signs":\n        new, move = [], sign(d)\n'),
        ],
    },
)  # fmt: skip

#: A bfloat16 that is rounded towards zero.
CODEC = Walk(
    "A new codec is five source files",
    {
        "engine/include/afflux/codec.hpp": [
            ('  CODING(rotated, "rotated", 4 | 2 | 1, "uint8", true, false, false, kBlock, 4 * kRotations)',
             ' \\\n  CODING(cut16, "cut16", 16, "uint8", false, false, false, kCodecBlock, 0)'),
        ],
        "engine/formula/half.hpp": [
            ("AFFLUX_FN float widened(Bfloat16 value) { "
             "return float_of(static_cast<std::uint32_t>(value.bits) << 16); }\n",
             "\n// The upper half of a float32, rounded towards zero.\n"
             "struct Cut16 {\n  std::uint16_t bits;\n};\n"
             "AFFLUX_FN float widened(Cut16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }\n"
             "AFFLUX_FN void narrow_finite(float value, Cut16* to) {\n"
             "  to->bits = static_cast<std::uint16_t>(bits_of(value) >> 16);\n}\n"),
        ],
        "engine/cpu/codec.cpp": [
            ("struct Coder<Coding::bfloat16> : HalvesCoder<Bfloat16> {};\n",
             "template <>\nstruct Coder<Coding::cut16> : HalvesCoder<formula::Cut16> {};\n"),
        ],
        "engine/cuda/codec.hpp": [
            ("  using Type = Halves<Bfloat16>;\n};\n",
             "template <>\nstruct CoderOf<Coding::cut16> {\n  using Type = Halves<formula::Cut16>;\n};\n"),
        ],
        "python/afflux/ops/codecs.py": [
            ('bfloat16 = Codec("bfloat16")  #: 2 bytes per element\n',
             'cut16 = Codec("cut16")  #: 2 bytes per element\n'),
            ('__all__ = ["Codec", "affine", "bfloat16", ', '"cut16", '),
        ],
    },
    {
        "tests/oracle/rows.py": [
            ('    if name in ("float16", "bfloat16"):\n        return halves(name, x).tobytes()\n',
             '    if name == "cut16":\n        return (x.view(u32) >> u32(16)).astype(np.uint16).tobytes()\n'),
            ("        return np.frombuffer(row, np.float16).astype(f32)\n",
             '    if name == "cut16":\n'
             "        return (np.frombuffer(row, np.uint16).astype(u32) << u32(16)).view(f32)\n"),
        ],
        "tests/engine/test_codecs.py": [
            ('"float16": (3e-8, 6e-8), "bfloat16": (2e-6, 4e-6),\n', '    "cut16": (8e-6, 16e-6),\n'),
        ],
    },
)  # fmt: skip

PRESET = Walk(
    "A preset is five files",
    {
        "python/afflux/rules/presets/slowmo.py": [
            ("",
             '"""SlowMo: momentum on the server.\n\n'
             "@inproceedings{wang2020slowmo,\n"
             "  title = {{SlowMo}: Improving Communication-Efficient Distributed {SGD} with Slow Momentum},\n"
             "  author = {Wang, Jianyu and Tantia, Vinayak and Ballas, Nicolas and Rabbat, Michael},\n"
             "  booktitle = {International Conference on Learning Representations},\n"
             "  year = {2020}\n"
             '}\n"""\n\n'
             "from afflux.rules.calibration import NONE\n"
             "from afflux.rules.optimizers import Momentum\n"
             "from afflux.rules.rule import Rule\n"
             "from afflux.rules.schedules import Rate\n"
             "from afflux.rules.weights import Examples\n\n\n"
             "def slowmo(*, buffer_size: int = 10, server_lr: Rate = 1.0, beta: float = 0.9) -> Rule:\n"
             '    """velocity = beta velocity + sum_i (n_i / sum n) u_i, x += server_lr velocity (Algorithm 1).\n\n'
             "    State on the server: params, the buffer and the velocity. Sweeps: one.\n"
             '    """\n'
             '    return Rule("slowmo", "update", buffer_size, Examples(), NONE, Momentum(server_lr, beta))\n'),
        ],
        "python/afflux/rules/presets/__init__.py": [
            ("from afflux.rules.presets.fedavg import fedavg\n", "from afflux.rules.presets.slowmo import slowmo\n"),
            ('    "fedavg": fedavg,\n', '    "slowmo": slowmo,\n'),
            ('    "fedavg",\n', '    "slowmo",\n'),
        ],
        "tests/oracle/presets/slowmo.py": [
            ("",
             '"""SlowMo."""\n\n'
             "import numpy as np\n\n"
             "from oracle import EPS\nfrom papers import decided, facts, moved, total\n\n\n"
             "def slowmo(state, buffer, *, server_lr=1.0, beta=0.9):\n"
             '    """velocity = beta velocity + the mean of updates by examples; x + eta velocity."""\n'
             "    _, n, _, updates = facts(buffer)\n"
             "    weights = n / n.sum()\n"
             "    v, terms = total(weights, updates)\n"
             '    velocity = beta * state["velocity"] + v\n'
             '    after = moved(state, state["params"] + server_lr * velocity, velocity=velocity)\n'
             "    return after, decided(weights, v, terms, server_lr)\n\n\n"
             "def bounds(before, buffer, after, decisions, dv, options):\n"
             '    """The error of the direction, and of a product and a sum."""\n'
             '    beta, lr = options.get("beta", 0.9), options.get("server_lr", 1.0)\n'
             '    error = dv + 4 * EPS * (np.abs(beta * before["velocity"]) + np.abs(after["velocity"]))\n'
             '    return {"velocity": error, "params": lr * error + 4 * EPS * np.abs(after["params"])}\n\n\n'
             'ROUNDS, BOUNDS, VECTORS = {"slowmo": slowmo}, {"slowmo": bounds}, {"slowmo": ("velocity",)}\n'
             'VARIANTS = {"slowmo-slow": ("slowmo", {"beta": 0.5, "server_lr": 0.1})}\n'),
        ],
        "docs/reference/rules.md": [
            ("| `fedavg` | update | x += eta sum (n_i / sum n) u_i | `(M+1)*4*d` | 1 | "
             "McMahan et al. 2017, Algorithm 1 |\n",
             "| `slowmo` | update | velocity = beta velocity + sum (n_i / sum n) u_i, x += eta velocity | "
             "`(M+2)*4*d` | 1 | Wang et al. 2020, as in Algorithm 1 |\n"),
        ],
        "python/afflux/selftest/golden.json": [],
    },
    {},
)  # fmt: skip

WALKS = (OPTIMIZER, CODEC, PRESET)


def insert(project: Path, walk: Walk) -> None:
    """Make a walk in a copy of the project.

    Raises:
        LookupError: a text does not stand once in its file, or a new file is there.
    """
    for name, insertions in (walk.files | walk.tests).items():
        path = project / name
        for anchor, text in insertions:
            if (not anchor) == path.exists():
                raise LookupError(f"{name} is {'there already' if path.exists() else 'not there'}")
            before = path.read_text() if anchor else ""
            if anchor and before.count(anchor) != 1:
                raise LookupError(f"{name} has {anchor!r} {before.count(anchor)} times")
            path.write_text(before.replace(anchor, anchor + text) if anchor else text)
