"""A lint: weights and steps use nothing whose last bit differs between CPUs (the numeric contract)."""

import ast
from pathlib import Path

import pytest

import afflux

PACKAGE = Path(afflux.__file__).parent
FILES = [PACKAGE / "ops" / "exact.py", PACKAGE / "aggregation" / "round.py", *sorted((PACKAGE / "rules").rglob("*.py"))]

#: Functions of NumPy and math that IEEE 754 fixes to the bit, or that do not compute.
NUMPY = {
    "abs", "arange", "array", "asarray", "ascontiguousarray", "bool_", "empty", "empty_like", "float32",
    "float64", "floating",
    "full", "generic", "int64", "integer", "isfinite", "isnan", "maximum", "minimum", "ndarray", "sqrt", "where",
    "zeros",
}  # fmt: skip
MATH = {"inf", "isfinite", "isnan", "nan", "sqrt"}
#: Methods whose order of addition, or whose rounding, is the library's own.
METHODS = {"dot", "mean", "sum", "std", "var", "cumsum", "prod", "cumprod", "trace"}


def offences(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node.lineno, "@"
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Pow):
            exponent = node.right if isinstance(node, ast.BinOp) else node.value
            base = node.left if isinstance(node, ast.BinOp) else node.target
            whole = isinstance(exponent, ast.Constant) and isinstance(exponent.value, int)
            if not (whole and isinstance(base, ast.Constant)):
                yield node.lineno, "**"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            allowed = {"np": NUMPY, "math": MATH}.get(node.value.id)
            if allowed is not None and node.attr not in allowed:
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("numpy", "math"):
            allowed = {"numpy": NUMPY, "math": MATH}[node.module]
            yield from ((node.lineno, a.name) for a in node.names if a.name not in allowed)
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in METHODS:
                yield node.lineno, f".{called.attr}()"
            if isinstance(called, ast.Name) and called.id in ("sum", "pow"):
                yield node.lineno, f"{called.id}()"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_exact_path(path):
    found = list(offences(path.read_text()))
    assert not found, f"{path.name}: {found}; use + - * / sqrt, afflux.exp, afflux.log, afflux.pow, and small loops"


@pytest.mark.parametrize(
    "line",
    ["np.exp(x)", "np.power(x, 2)", "x ** 0.5", "x ** y", "a @ b", "np.dot(a, b)", "a.dot(b)", "a.sum()", "np.sum(a)",
     "sum(a)", "pow(a, b)", "math.exp(x)", "from math import pow", "from numpy import exp", "x **= 2",
     "np.linalg.norm(x)"],
)  # fmt: skip
def test_the_lint_sees(line):
    assert list(offences(line))


@pytest.mark.parametrize("line", ["a + b * c / d - np.sqrt(e)", "2**63", "math.sqrt(2)", "np.array([1])"])
def test_the_lint_lets_pass(line):
    assert not list(offences(line))
