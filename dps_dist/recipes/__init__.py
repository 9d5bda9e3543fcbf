"""Recipes: YAML files that say what differs from the one they extend, resolved to a Config.

A recipe has a `description`, may say `extends: NAME`, and holds any fields of the configuration.
"""

import datetime
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dps_dist.config import Config
from dps_dist.errors import InputError

FOLDER = Path(__file__).parent
DEFAULT = "digits"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text; everyone means the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def description(name: str) -> str:
    return str(_read(name).get("description", ""))


def load(name: str = DEFAULT, settings: Iterable[str] = ()) -> Config:
    """The configuration of a recipe (a name, or the path of a YAML file) with `a.b=c` settings."""
    return resolve(_extended(name), settings, where=f"recipe {name}")


def resolve(fields: Mapping[str, Any], settings: Iterable[str] = (), *, where: str) -> Config:
    """A validated Config, or an InputError with one sentence per wrong field."""
    merged = dict(fields)
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals or not all(path.split(".")):
            raise InputError(f"--set {setting}: write it as section.field=value")
        merged = _merge(merged, _nested(path.split("."), _parse(value, f"--set {setting}")))
    try:
        # Strict, and through JSON: text is no number and true is no 1, but a list may fill a tuple.
        text = json.dumps(merged, default=_date)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: it holds what no field can be ({error})") from None
    try:
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        sentences = [_sentence(e["loc"], e["type"], e["input"], e["msg"]) for e in error.errors()]
        raise InputError(f"{where}: " + "; ".join(sentences)) from None


def as_yaml(config: Config) -> str:
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)
    return text


def _read(name: str) -> dict[str, Any]:
    file = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not file.is_file():
        close = difflib.get_close_matches(name, names(), 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"recipe {name} does not exist: {hint}`dps recipes` lists all; your own needs its .yaml"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not a text file: a recipe is YAML in UTF-8") from None
    fields = _parse(text, str(file)) or {}
    if not isinstance(fields, dict):
        raise InputError(f"{file}: a recipe is a mapping of sections, such as `data:`")
    return fields


def _extended(name: str, below: tuple[str, ...] = ()) -> dict[str, Any]:
    name = str(Path(name).resolve()) if name.endswith((".yaml", ".yml")) else name
    if name in below:
        raise InputError(
            f"recipe {name} extends itself ({' → '.join((*below, name))}): remove one `extends`"
        )
    fields = _read(name)
    fields.pop("description", None)
    base = fields.pop("extends", None)
    if base is None:
        return fields
    if not isinstance(base, str):
        raise InputError(f"recipe {name}: extends is {base!r}: give the name of one recipe")
    if base.endswith((".yaml", ".yml")):  # as everywhere, relative to the file that says it
        base = str(Path(name).parent / base)
    return _merge(_extended(base, (*below, name)), fields)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; sections are merged field by field, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _date(value: Any) -> str:
    """YAML reads 2024-01-01 as a date; here it is text. It has other types that are refused."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"{value!r} is neither text, number, list nor mapping")


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: builds plain values only
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise InputError(f"{where}: not valid YAML{at}; {problem}") from None


def _sentence(loc: tuple[int | str, ...], kind: str, value: Any, message: str) -> str:
    path = ".".join(map(str, loc))
    section, field = _field(loc)
    if kind == "extra_forbidden" and section is not None:
        known = list(section.model_fields)
        close = difflib.get_close_matches(str(loc[-1]), known, 1)
        remedy = f"did you mean {close[0]}?" if close else f"known here are {', '.join(known)}"
        return f"{path} is not a field of the configuration: {remedy}"
    if kind == "value_error":  # of a section, and begins with its field
        return f"{path}.{message.removeprefix('Value error, ')}"
    problem = message.removeprefix("Input ")
    about = f" ({field})" if field else ""
    shown = "" if isinstance(value, dict) else f" is {json.dumps(value)}"
    return f"{path}{shown}: {problem}{about}"


def _field(loc: tuple[int | str, ...]) -> tuple[type[BaseModel] | None, str | None]:
    """The section that holds the field at `loc`, and the field's description."""
    section: type[BaseModel] | None = Config
    about = None
    for key in loc:
        field = section.model_fields.get(str(key)) if section else None
        if field is None:
            break
        about = field.description
        inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
        models = [t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)]
        if models and key != loc[-1]:
            section = models[0]
    return section, about
