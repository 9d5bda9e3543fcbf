"""The files that recipes are made of, and the YAML in them."""

import re
from pathlib import Path
from typing import Any

import yaml

from dps_dist.errors import InputError

FOLDER = Path(__file__).parent
PARTS = FOLDER / "parts"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text and 1:4 as 64; everyone means the number, and the text.

    Of two values for one key it takes the last; nobody means that.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                problem = f"{key.value} stands there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


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
    """The recipes that come with the package, each to be combined with parts."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def parts() -> list[str]:
    """What may follow a recipe's name, joined to it by "-": methods, mixes, label noise, …"""
    return sorted(file.stem for file in PARTS.glob("*.yaml"))


def is_path(name: str) -> bool:
    """Whether a recipe's name is the path of a file of the user's own."""
    return name.endswith((".yaml", ".yml"))


def read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not a text file: a recipe is YAML in UTF-8") from None
    return parse(text, str(file))


def parse(text: str, where: str) -> dict[str, Any]:
    """The fields in a recipe's text, or in a run's config.yaml, whose `run` facts are left out."""
    fields = value(text, where) or {}
    if not isinstance(fields, dict):
        raise InputError(f"{where}: a recipe is a mapping of sections, such as `data:`")
    fields.pop("run", None)
    return fields


def value(text: str, where: str) -> Any:
    """What a YAML text stands for."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: builds plain values only
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise InputError(f"{where}: not valid YAML{at}; {problem}") from None
