"""docs/fields.md, from what the sections say of themselves: `python -m dps_dist.config.fields`."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dps_dist.config.sections import Config

HEAD = """# Fields

Written by `python -m dps_dist.config.fields` from `dps_dist/config/sections.py`. Every field of a
run can stand in a recipe or be given as `--set section.field=value`, where the value is YAML, as in
`--set data.noise.rate=.4` or `--set 'augment.scale=[.2, 1]'`. Defaults are those of an empty
recipe; `dps recipes show NAME` prints what a recipe makes of them. The fields of `method` are those
of the method that `method.name` chooses: [methods.md](methods.md).
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(_section, (n for n in Config.model_fields if n != "method"))])


def _section(name: str) -> str:
    field = Config.model_fields[name]
    rows = [
        f"| `{path}` | {_shown(one.default)} | {one.description}{_choices(one)} |"
        for path, one in _fields(name, field)
    ]
    title = f"## `{name}`: {field.description}"
    return "\n".join([title, "", "| field | default | |", "|---|---|---|", *rows, ""])


def _fields(path: str, field: FieldInfo) -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a section; one that holds a section is followed by that one's."""
    section = _section_of(field)
    assert section is not None
    for name, one in section.model_fields.items():
        below = _section_of(one)
        if below is None or one.default is None:
            yield f"{path}.{name}", one
        if below is not None:
            yield from _fields(f"{path}.{name}", one)


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, or may hold."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _choices(field: FieldInfo) -> str:
    """What may be given, where the type names it."""
    kinds = [field.annotation, *get_args(field.annotation)]
    found = [arg for kind in kinds if get_origin(kind) is Literal for arg in get_args(kind)]
    how = "a list of any of" if get_origin(field.annotation) is tuple else "one of"
    return f"; {how} {', '.join(found)}" if found else ""


def _shown(default: Any) -> str:
    if isinstance(default, bool) or default is None:
        return {True: "true", False: "false", None: "null"}[default]
    if isinstance(default, tuple):
        return f"[{', '.join(f'{one:.4g}' for one in default)}]"
    return str(default)


if __name__ == "__main__":
    print(page(), end="")
