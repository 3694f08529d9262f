"""The models of runs as files of safetensors: every array by its name, and its role."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from afflux.lab.tasks.inputs import content_digest
from afflux.ops.errors import ConfigError
from afflux.sim.errors import require

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = "models"  #: in a run folder


def module_arrays(module: "nn.Module") -> "dict[str, Tensor]":
    """Return the parameters and buffers of a torch module by name, each once."""
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def constants_sha256(module: "nn.Module", roles: Mapping[str, str]) -> str:
    """Return the SHA-256 of the arrays without a role, which no client trains; empty if there are none."""
    constants = {name: tensor for name, tensor in module_arrays(module).items() if name not in roles}
    return content_digest(constants) or ""


def write_model(path: Path, module: "nn.Module", roles: Mapping[str, str]) -> None:
    """Write all arrays of a torch module; the metadata hold their roles: constant, if `roles` does not name them."""
    from safetensors.torch import save_file

    arrays = {name: tensor.clone().contiguous() for name, tensor in module_arrays(module).items()}
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    save_file(arrays, new, {"roles": json.dumps({name: roles.get(name, "constant") for name in arrays})})
    new.replace(path)


def load_model(path: Path, module: "nn.Module") -> None:
    """Copy the arrays of a file into a torch module; raise ConfigError, and change nothing, if they do not fit."""
    require("torch", "safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    arrays = module_arrays(module)
    for name in {**arrays, **saved}:
        shapes = [tuple(held[name].shape) if name in held else None for held in (saved, arrays)]
        if shapes[0] != shapes[1]:
            raise ConfigError(f"{path}: {name} has shape {shapes[0]}, but in the model it is {shapes[1]}")
    for name, tensor in arrays.items():
        tensor.copy_(saved[name])
