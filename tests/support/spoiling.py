"""Replaces arguments of a call, or something in them, by hostile values."""

import dataclasses
from random import Random

import msgspec

import afflux
from afflux import Rule
from hostile import SCALARS
from hostile_arrays import ARRAYS


def hostile(rng: Random):
    return rng.choice(rng.choice([SCALARS, ARRAYS]))()


def spoiled(value, rng: Random, depth=0):
    """The value, or something in it, replaced by a hostile one."""
    if depth < 6 and rng.random() < 0.75:
        if isinstance(value, dict) and value:
            key = rng.choice(list(value))
            changed = dict(value)
            what = rng.random()
            if what < 0.1:
                del changed[key]
            elif what < 0.2:
                changed[_hashable(rng)] = hostile(rng)
            else:
                changed[key] = spoiled(value[key], rng, depth + 1)
            return changed
        if isinstance(value, (list, tuple)) and value:
            place = rng.randrange(len(value))
            items = list(value)
            if rng.random() < 0.1:
                del items[place]
            else:
                items[place] = spoiled(items[place], rng, depth + 1)
            if hasattr(value, "_fields") and len(items) == len(value):
                return type(value)(*items)
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, msgspec.Struct) and value.__struct_fields__:
            name = rng.choice(value.__struct_fields__)
            return msgspec.structs.replace(value, **{name: spoiled(getattr(value, name), rng, depth + 1)})
        if (
            dataclasses.is_dataclass(value)
            and not isinstance(value, type | Rule | afflux.Task)
            and dataclasses.fields(value)
        ):
            field = rng.choice(dataclasses.fields(value))
            if field.init:
                return dataclasses.replace(value, **{field.name: spoiled(getattr(value, field.name), rng, depth + 1)})
    return hostile(rng)


def _hashable(rng):
    while True:
        key = hostile(rng)
        try:
            hash(key)
            key == key  # noqa: B015
        except Exception:
            continue
        return key
