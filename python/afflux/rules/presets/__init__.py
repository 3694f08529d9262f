"""The presets: the papers' rules as compositions of parts, one file for each paper."""

from collections.abc import Callable

from afflux.rules.presets.aflguard import aflguard
from afflux.rules.presets.anarchic import afa_cd, afa_cs
from afflux.rules.presets.ca2fl import ca2fl, mf_ca2fl
from afflux.rules.presets.diloco import diloco
from afflux.rules.presets.dp_fedbuff import dp_fedbuff
from afflux.rules.presets.fadas import fadas
from afflux.rules.presets.fedams import fedams
from afflux.rules.presets.fedasync import fedasync
from afflux.rules.presets.fedavg import fedavg
from afflux.rules.presets.fedavgm import fedavgm
from afflux.rules.presets.fedbuff import fedbuff
from afflux.rules.presets.fedmedian import fedmedian, fedtrimmedavg
from afflux.rules.presets.fedopt import fedadagrad, fedadam, fedyogi
from afflux.rules.presets.fedstale import fedstale
from afflux.rules.presets.fltrust import fltrust
from afflux.rules.presets.gsgm import gsgm
from afflux.rules.presets.krum import krum, multi_krum
from afflux.rules.presets.sasgd import sasgd
from afflux.rules.presets.twafl import twafl
from afflux.rules.presets.wkafl import wkafl
from afflux.rules.presets.zenopp import zenopp
from afflux.rules.rule import Rule

#: Every preset by name; the contract tests test each of them. Each can be called without arguments.
RULES: dict[str, Callable[..., Rule]] = {
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "diloco": diloco,
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
    "fedstale": fedstale,
    "wkafl": wkafl,
    "twafl": twafl,
    "sasgd": sasgd,
    "gsgm": gsgm,
    "zenopp": zenopp,
    "aflguard": aflguard,
    "fltrust": fltrust,
    "krum": krum,
    "multi_krum": multi_krum,
    "fedmedian": fedmedian,
    "fedtrimmedavg": fedtrimmedavg,
    "dp_fedbuff": dp_fedbuff,
}

#: The synchronous presets. They are exact if M clients start together and the server waits for all of them.
SYNCHRONOUS = ("fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedams")

#: The presets of which the authors' code was not seen: their formulas may change in any release.
EXPERIMENTAL = ("diloco", "aflguard", "fltrust", "krum", "multi_krum", "fedmedian", "fedtrimmedavg", "dp_fedbuff")

__all__ = [
    "EXPERIMENTAL",
    "RULES",
    "SYNCHRONOUS",
    "afa_cd",
    "afa_cs",
    "aflguard",
    "ca2fl",
    "diloco",
    "dp_fedbuff",
    "fadas",
    "fedadagrad",
    "fedadam",
    "fedams",
    "fedasync",
    "fedavg",
    "fedavgm",
    "fedbuff",
    "fedmedian",
    "fedstale",
    "fedtrimmedavg",
    "fedyogi",
    "fltrust",
    "gsgm",
    "krum",
    "mf_ca2fl",
    "multi_krum",
    "sasgd",
    "twafl",
    "wkafl",
    "zenopp",
]
