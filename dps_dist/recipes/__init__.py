"""Recipes: YAML files that say what differs from the one they extend, resolved to a Config.

A recipe has a `description`, may say `extends: NAME`, and holds any fields of the configuration.
A name is a file's, or a file's and parts (`compose.py`); `paper.py` names those of the paper.
"""

import datetime
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dps_dist.config import Config
from dps_dist.errors import InputError
from dps_dist.recipes.compose import (
    DEFAULT_NAMES,
    description,
    fields_of,
    merge,
    part_description,
)
from dps_dist.recipes.files import names, parse, parts, value

__all__ = [
    "DEFAULT",
    "as_yaml",
    "description",
    "fields_of",
    "load",
    "names",
    "parse",
    "part_description",
    "parts",
    "resolve",
]

DEFAULT = "digits"
MOST_SHOWN = 80  # letters of a wrong value


def load(name: str = DEFAULT, settings: Iterable[str] = ()) -> Config:
    """The configuration of a recipe (a name, or the path of a YAML file) with `a.b=c` settings."""
    return resolve(fields_of(name), settings, where=f"recipe {name}")


def resolve(fields: Mapping[str, Any], settings: Iterable[str] = (), *, where: str) -> Config:
    """A validated Config, or an InputError with one sentence per wrong field."""
    merged = dict(fields)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not all(path.split(".")):
            raise InputError(f"--set {setting}: write it as section.field=value")
        if re.search(r"\s#", text) and not text.startswith(("'", '"')):
            raise InputError(
                f"--set {setting}: what follows ' #' is lost: quote it, {path}='\"…\"'"
            )
        merged = merge(merged, _nested(path.split("."), value(text, f"--set {setting}")))
    try:
        # Strict, and through JSON: text is no number and true is no 1, but a list may fill a tuple.
        as_json = json.dumps(_named(merged), default=_date)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: it holds what no field can be ({error})") from None
    try:
        return Config.model_validate_json(as_json, strict=True)
    except ValidationError as error:
        wrong = {  # of a field that may be a number or a text, what is said last
            tuple(key for key in e["loc"] if key not in ("int", "str")): e for e in error.errors()
        }
        sentences = [_sentence(e["loc"], e["type"], e["input"], e["msg"]) for e in wrong.values()]
        raise InputError(f"{where}: " + "; ".join(sentences)) from None


def as_yaml(config: Config) -> str:
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)
    return text


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With the name of the default method, and task, where fields of one are given without."""
    return {
        key: {"name": DEFAULT_NAMES[key], **_named(section)}
        if key in DEFAULT_NAMES and isinstance(section, dict)
        else section
        for key, section in fields.items()
    }


def _date(value: Any) -> str:
    """YAML reads 2024-01-01 as a date; here it is text. It has other types that are refused."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"{value!r} is neither text, number, list nor mapping")


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


def _sentence(loc: tuple[int | str, ...], kind: str, value: Any, message: str) -> str:
    section, field = _field(loc)
    # pydantic puts a method's name after `method`, and after `task`
    shown_loc = [key for at, key in enumerate(loc) if not at or loc[at - 1] not in DEFAULT_NAMES]
    path = ".".join(str(key) for key in shown_loc if key not in ("int", "str"))
    if kind == "union_tag_invalid":
        tags = message.split("expected tags: ")[-1].replace("'", "")
        return f"{path}.name is {json.dumps(value.get('name'))}: give one of {tags}"
    if kind == "extra_forbidden" and section is not None:
        known = list(section.model_fields)
        close = difflib.get_close_matches(str(loc[-1]), known, 1)
        remedy = f"did you mean {close[0]}?" if close else f"known here are {', '.join(known)}"
        return f"{path} is not a field of the configuration: {remedy}"
    if kind == "value_error":  # of a section, and begins with its field
        return f"{path}.{message.removeprefix('Value error, ')}"
    problem = message.removeprefix("Input ")
    about = f" ({field})" if field else ""
    shown = json.dumps(value)
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}…"
    return f"{path} is {shown}: {problem}{about}"


def _field(loc: tuple[int | str, ...]) -> tuple[type[BaseModel] | None, str | None]:
    """The section that holds the field at `loc`, and the field's description."""
    section: type[BaseModel] | None = Config
    about = None
    for here, key in enumerate(loc):
        field = section.model_fields.get(str(key)) if section else None
        if field is None:
            continue  # a method's name, or a place in a list
        about = field.description
        inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
        models = [t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)]
        if models and here + 1 < len(loc):
            tagged = [m for m in models if "name" in m.model_fields]
            named = [m for m in tagged if m.model_fields["name"].default == loc[here + 1]]
            section, about = (named or models)[0], None
    return section, about
