"""A configuration as fields with dotted names."""

from collections.abc import Iterator
from typing import Any


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
