"""CA2FL (Wang, Cao, Wu, Chen and Chen): Tables 6 and 7.

Numbers of tables and sections are those of the workshop version, FL-ICML 2023; the published version is of ICLR 2024.
"""

from collections.abc import Iterator
from dataclasses import replace

from afflux.lab.presets.preset import DECIDED, Preset, Sourced, sourced, task_of

PAPER = "CA2FL, FL-ICML 2023 and ICLR 2024"
APPENDIX = "appendix, experiment settings"
NETWORK = (
    "The paper names a CNN by Wang and Ji (2022) and does not print it. This is the small network of two that are in "
    "use by these authors, 551,786 parameters; which of the two the paper ran is open: see docs/reference/data.md."
)
ROUNDS, BUFFER = 500, 10
AUGMENT = ":augment=crop-flip"
SPEED = "decided: cropped and flipped images: below 50 % after 200 rounds as in the paper, docs/results/ca2fl-speed.md"
NORM = "the paper says ResNet-18; decided: BatchNorm, as in the code of the authors' FADAS"

#: (model, data, Dirichlet's alpha), the rows of Table 6; the first of a model and a data set has no "-dir" in its name.
ROWS = (
    ("cnn", "cifar10", 0.3),
    ("cnn", "cifar10", 0.1),
    ("resnet18", "cifar10", 0.3),
    ("resnet18", "cifar10", 0.1),
    ("resnet18", "cifar100", 0.1),
    ("resnet18", "cifar100", 0.01),
)
#: The learning rates are the same in all cells of Table 6.
CLIENT_LR, SERVER_LR = 0.01, 1.0
_QUANTIZER = "section 5; the quantizer is not named, decided: affine with one scale, docs/reference/codecs.md"
METHODS = {
    "": Sourced("ca2fl", "Algorithm 1"),
    "-async": Sourced("fedbuff:staleness=constant", "Algorithm 2, with the mean of its proofs"),
    "-mf8": Sourced("mf_ca2fl:bits=8:codec=affine-vector", _QUANTIZER),
    "-mf4": Sourced("mf_ca2fl:bits=4:codec=affine-vector", _QUANTIZER),
}
_RATE_DECIDED = f"{DECIDED}; not legible in our copy of Table 7, all other client rates of Tables 6 and 7 are 0.01"
#: Table 7: (model, suffix, FedAsync's rule, the proximal weight rho, source of the client's learning rate). ResNet-18's
#: constant update (rate 0.01, rho 0.1) has no preset, as its alpha is not legible in our copy.
FEDASYNC = (
    ("cnn", "-fedasync", "fedasync:alpha=0.3:staleness=constant", 1.0, "Table 7"),
    ("cnn", "-fedasync-polynomial", "fedasync:alpha=0.5:staleness=polynomial(0.3)", 1.0, "Table 7"),
    ("resnet18", "-fedasync-polynomial", "fedasync:alpha=0.3:staleness=polynomial(0.3)", 0.1, _RATE_DECIDED),
)


def presets() -> Iterator[Preset]:
    """Yield the presets, row by row."""
    seen = set()
    for model, data, alpha in ROWS:
        name = f"ca2fl-{model}" + ("" if data == "cifar10" else f"-{data}")
        name += f"-dir{alpha:g}" if (model, data) in seen else ""
        seen.add((model, data))
        ca2fl = _ca2fl(name, model, data, alpha)
        settings = {
            **ca2fl.settings,
            **sourced("Table 6", client_lr=CLIENT_LR),
            **sourced("Algorithm 2: M new clients when M have finished", refill=BUFFER),
            **sourced("Tables 1 and 2: T = 500", rounds=ROUNDS),
        }
        for suffix, rule in METHODS.items():
            yield replace(ca2fl, name=name + suffix, rule=rule, settings=settings)
    for model, suffix, text, rho, source in FEDASYNC:
        ca2fl = _ca2fl(f"ca2fl-{model}{suffix}", model, "cifar10", 0.3)
        settings = {
            **ca2fl.settings,
            **sourced(source, client_lr=CLIENT_LR),
            **sourced("appendix: regularization with weight rho", client_optimizer="fedasync"),
            **sourced("Table 7: rho", mu=rho),
            **sourced(f"{DECIDED}: as many arrivals as the methods with a buffer have", arrivals=ROUNDS * BUFFER),
        }
        rule = Sourced(text, "Table 7")
        yield replace(ca2fl, rule=rule, settings=settings, buffer_size=None, server_lr=None)


def _ca2fl(name: str, model: str, data: str, alpha: float) -> Preset:
    """Return the preset of CA2FL without the client's rate and the end of the run."""
    network, title = ("ca2fl-cnn", "CNN") if model == "cnn" else ("resnet18-bn", "ResNet-18")
    task, decided = (task_of(data, network) + AUGMENT, SPEED) if model == "cnn" else (task_of(data, network), NORM)
    settings = {
        **sourced(f"Table 6; {decided}", task=task),
        **sourced(APPENDIX, num_clients=100),
        **sourced(f"{APPENDIX}: M_c", concurrency=20),
        **sourced("section 6", partition="dirichlet"),
        **sourced("Table 6", alpha=alpha),
        **sourced(APPENDIX, local_epochs=2, batch_size=50, weight_decay=1e-4),
        **sourced("appendix: halfnorm(s), s ~ U(0, 5); s is the location (docs/reference/data.md)", delays="ca2fl"),
        **sourced("Table 1: the round that reaches an accuracy, hence each round", eval_every=BUFFER),
    }
    buffer_size, server_lr = Sourced(BUFFER, f"{APPENDIX}: M"), Sourced(SERVER_LR, "Table 6")
    about, note = f"{title} on {data}, Dir({alpha:g})", NETWORK if model == "cnn" else ""
    return Preset(name, PAPER, about, data, network, METHODS[""], settings, buffer_size, server_lr, note)
