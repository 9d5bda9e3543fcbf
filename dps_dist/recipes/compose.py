"""From a recipe's name to its fields: what it extends, its parts, and what they say of each other.

cifar10-resnet18-te-sym20 is the file cifar10-resnet18.yaml with parts/te.yaml and parts/sym20.yaml.
Files are laid over each other: what the base extends, from the root down, the base, the parts (by
name, so that their order in the recipe's name does not matter). Then comes what they hold under
`with`: fields for a combination of parts, such as `dps+cutmix`, if all of these are among the
recipe's parts or are its method. Larger combinations win, then what a base says, then the later
file. Where the largest are several that set a field differently, the recipe is refused.
A user's own file is laid over what it extends when all that is done.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from dps_dist.config.flat import flatten
from dps_dist.errors import InputError
from dps_dist.recipes import files

DEFAULT_NAMES = {"method": "dps", "task": "baseline"}
WHOLE = ("mapping",)  # fields that are mappings, and no sections
_NOTES = ("description", "extends", "with", "part")  # on a file, and no fields

Fields = dict[str, Any]


class _Combination(NamedTuple):
    """What is set where these parts meet, the one whose file says so among them."""

    names: frozenset[str]
    fields: Fields
    of_a_part: bool


def fields_of(name: str) -> Fields:
    """The fields of a recipe: of a file, or of a base and its parts."""
    try:
        return _settle(*_layers(name), name)
    except RecursionError:
        raise InputError(
            f"recipe {name}: it holds what no field can be (a mapping that holds itself)"
        ) from None


def own_files(name: str) -> list[Path]:
    """The user's own files that a recipe is made of: its own, and what that extends by a relative
    path. One that is named by its whole path is where it is on any machine."""
    found = [Path(name)]
    extends = str(_read(name).get("extends", ""))
    if files.is_path(extends) and not Path(extends).is_absolute():
        found += own_files(str(Path(name).parent / extends))
    return found


def description(name: str) -> str:
    if files.is_path(name):
        return str(_read(name).get("description", ""))
    base, parts = split(name)
    layers = [_read(base), *map(_read_part, parts)]
    return "; ".join(str(layer["description"]) for layer in layers if "description" in layer)


def part_description(part: str) -> str:
    return str(_read_part(part).get("description", ""))


def split(name: str) -> tuple[str, list[str]]:
    """The base, the longest recipe that the name begins with, and its parts, sorted."""
    words, known = name.split("-"), files.names()
    begins = ["-".join(words[:n]) for n in range(len(words), 0, -1)]
    base = next((begin for begin in begins if begin in known), None)
    if base is None:
        raise _no_recipe(name)
    parts = sorted(words[base.count("-") + 1 :])
    for part in parts:
        if part not in files.parts():
            raise InputError(f"recipe {name} does not exist: {_no_part(part)}")
        if parts.count(part) > 1:
            raise InputError(f"recipe {name} names {part} twice: once is enough")
    return base, parts


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Fields:
    """`over` wins; sections are merged field by field, everything else is replaced.

    Another `name` (of a method, or of KD's task) leaves nothing of the old one's fields.
    """
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict) and key not in WHOLE
        if both and key in DEFAULT_NAMES and "name" in value:
            both = value["name"] == merged[key].get("name", DEFAULT_NAMES[key])
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _layers(name: str, below: tuple[str, ...] = ()) -> tuple[list[Fields], list[str]]:
    """The files of a recipe, from the root down, and its parts."""
    own = files.is_path(name)
    base, new = (str(Path(name).resolve()), []) if own else split(name)
    if base in below:
        raise InputError(
            f"recipe {base} extends itself ({' → '.join((*below, base))}): remove one `extends`"
        )
    fields = _read(base)
    layers: list[Fields] = []
    parts = new
    if (extends := fields.get("extends")) is not None:
        if not isinstance(extends, str):
            raise InputError(f"recipe {base}: extends is {extends!r}: give the name of one recipe")
        if files.is_path(extends):  # as everywhere, relative to the file that says it
            extends = str(Path(base).parent / extends)
        layers, old = _layers(extends, (*below, base))
        layers = [_settle(layers, old, extends)] if own else layers
        parts = [*old, *new]
    of_parts = {part: _read_part(part) for part in parts}
    _refuse_both(name, of_parts)
    return [*layers, fields, *(of_parts[part] for part in new)], parts


def _settle(layers: list[Fields], parts: Iterable[str], where: str) -> Fields:
    """The layers as one, and what they hold for these parts together."""
    fields: Fields = {}
    for layer in layers:
        fields = merge(fields, _without_notes(layer))
    method = fields.get("method")
    chosen = method.get("name") if isinstance(method, dict) else None
    present = {*parts, chosen if isinstance(chosen, str) else DEFAULT_NAMES["method"]}
    combined = [entry for layer in layers for entry in _with(layer, where)]
    applied = [entry for entry in combined if present.issuperset(entry.names)]
    _refuse_ambiguous(where, applied)
    for entry in sorted(applied, key=lambda entry: (len(entry.names), not entry.of_a_part)):
        fields = merge(fields, entry.fields)
    return fields


def _refuse_ambiguous(where: str, entries: Iterable[_Combination]) -> None:
    """Refuse a field that two largest combinations, of as many parts, set differently."""
    largest: dict[str, tuple[_Combination, Any]] = {}
    refused = {}
    for entry in sorted(entries, key=lambda entry: len(entry.names)):
        for path, value in flatten(entry.fields):
            before, then = largest.get(path, (entry, value))
            apart = len(before.names) == len(entry.names) > 1 and before.names != entry.names
            refused[path] = (before, entry) if apart and then != value else None
            largest[path] = entry, value
    for path, two in refused.items():
        if two is not None:
            both = " and ".join("+".join(sorted(entry.names)) for entry in two)
            raise InputError(
                f"recipe {where}: {both} set {path} differently, and nothing is known of them "
                "together: write a recipe of your own that sets it"
            )


def _with(layer: Fields, where: str) -> Iterator[_Combination]:
    held = layer.get("with", {})
    for key, more in held.items() if isinstance(held, dict) else [(held, None)]:
        if not isinstance(more, dict):
            raise InputError(
                f"recipe {where}: with holds {key!r}: give parts and their fields, such as "
                "dps+cutmix: {method: {c: 500}}"
            )
        names = str(key).split("+")
        for part in names:
            if part not in files.parts():
                raise InputError(f"recipe {where}: with holds {key!r}: {_no_part(part)}")
        own = [layer["part"]] if "part" in layer else []
        yield _Combination(frozenset([*names, *own]), more, bool(own))


def _refuse_both(name: str, of_parts: Mapping[str, Fields]) -> None:
    """Refuse two parts that set one field, unless one says what becomes of both."""
    for (one, fields), (other, others) in combinations(of_parts.items(), 2):
        if other in fields.get("with", {}) or one in others.get("with", {}):
            continue
        mine, theirs = (dict(flatten(_without_notes(layer))) for layer in (fields, others))
        for path in sorted(mine.keys() & theirs.keys()):
            if mine[path] != theirs[path]:
                raise InputError(f"recipe {name}: {one} and {other} both set {path}: take one")


def _without_notes(layer: Fields) -> Fields:
    return {key: value for key, value in layer.items() if key not in _NOTES}


def _read(name: str) -> Fields:
    file = Path(name) if files.is_path(name) else files.FOLDER / f"{name}.yaml"
    if not file.is_file():
        raise _no_recipe(name)
    fields = files.read(file)
    if "part" in fields:
        raise InputError(
            f"recipe {name}: part is {fields['part']!r}: remove it; parts are named in extends, as "
            "in `extends: cifar10-resnet18-te-sym20`"
        )
    return fields


def _read_part(name: str) -> Fields:
    return {**files.read(files.PARTS / f"{name}.yaml"), "part": name}


def _no_recipe(name: str) -> InputError:
    close = difflib.get_close_matches(name, files.names(), 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return InputError(
        f"recipe {name} does not exist: {hint}`dps recipes` lists all; your own needs its .yaml"
    )


def _no_part(name: str) -> str:
    close = difflib.get_close_matches(name, files.parts(), 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{name} is not a part: {hint}the parts are {', '.join(files.parts())}"
