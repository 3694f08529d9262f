"""The presets: the papers' rules as compositions of parts, one paper a file."""

from collections.abc import Callable

from afflux.rule import Rule
from afflux.rules.anarchic import afa_cd, afa_cs
from afflux.rules.ca2fl import ca2fl, mf_ca2fl
from afflux.rules.fadas import fadas
from afflux.rules.fedams import fedams
from afflux.rules.fedasync import fedasync
from afflux.rules.fedavg import fedavg
from afflux.rules.fedbuff import fedbuff
from afflux.rules.fedopt import fedadagrad, fedadam, fedyogi
from afflux.rules.gsgm import gsgm
from afflux.rules.sasgd import sasgd
from afflux.rules.twafl import twafl
from afflux.rules.wkafl import wkafl
from afflux.rules.zenopp import zenopp

#: Every preset by name; the contract tests walk it. Each can be called without arguments.
RULES: dict[str, Callable[..., Rule]] = {
    "fedavg": fedavg,
    "fedbuff": fedbuff,
    "fedasync": fedasync,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
    "fedams": fedams,
    "fadas": fadas,
    "afa_cd": afa_cd,
    "afa_cs": afa_cs,
    "ca2fl": ca2fl,
    "mf_ca2fl": mf_ca2fl,
    "wkafl": wkafl,
    "twafl": twafl,
    "sasgd": sasgd,
    "gsgm": gsgm,
    "zenopp": zenopp,
}

#: The synchronous ones: they are exact there when M is a cohort that starts together and is waited for.
SYNCHRONOUS = ("fedavg", "fedadam", "fedyogi", "fedadagrad", "fedams")

__all__ = ["RULES", "SYNCHRONOUS", *RULES]
