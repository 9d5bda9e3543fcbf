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
DEFAULT_METHOD = "dps"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text and 1:4 as 64; everyone means the number, and the text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag != "tag:yaml.org,2002:int"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0o?[0-7_]+|0b[01_]+)$"),
    list("-+0123456789"),
)
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
    if isinstance(merged.get("method"), dict):
        merged["method"] = {"name": DEFAULT_METHOD, **merged["method"]}
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
    return parse(text, str(file))


def parse(text: str, where: str) -> dict[str, Any]:
    """The fields in a recipe's text, or in a run's config.yaml, whose `run` facts are left out."""
    fields = _parse(text, where) or {}
    if not isinstance(fields, dict):
        raise InputError(f"{where}: a recipe is a mapping of sections, such as `data:`")
    fields.pop("run", None)
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
    """`over` wins; sections are merged field by field, everything else is replaced.

    Another `name` (of a method) leaves nothing of the old one's fields.
    """
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        renamed = both and key == "method" and "name" in value
        if renamed and value["name"] != merged[key].get("name", DEFAULT_METHOD):
            both = False
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
    if kind == "union_tag_invalid":
        tags = message.split("expected tags: ")[-1].replace("'", "")
        return f"method.name is {json.dumps(value.get('name'))}: give one of {tags}"
    section, field = _field(loc)
    if loc[0] == "method":  # pydantic puts the method's name in between
        loc = ("method", *loc[2:])
    path = ".".join(str(key) for key in loc if key not in ("int", "str"))
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
