"""What a model learns from: one method a file, found by the name that its settings carry."""

from importlib import import_module

from pydantic import BaseModel

from dps_dist.methods.base import Evidence, Method, Mix, Samples, Strong, View

__all__ = ["Evidence", "Method", "Mix", "Samples", "Strong", "View", "build"]


def build(settings: BaseModel) -> Method:
    """The method of `config.method`: what `build(settings)` of methods/<name>.py gives."""
    module = import_module(f"dps_dist.methods.{settings.name}")  # type: ignore[attr-defined]
    method: Method = module.build(settings)
    return method
