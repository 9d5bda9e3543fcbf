"""A run's folder: made new, or found again for --resume. `dps train` asks before Ray is started."""

import datetime
import errno
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from dps_dist import recipes
from dps_dist.config import Config
from dps_dist.config.flat import flatten
from dps_dist.errors import InputError
from dps_dist.locks import lock
from dps_dist.train.files import CONFIG, METRICS, SUMMARY
from dps_dist.train.storage import Storage, sync, without_secrets
from dps_dist.train.trained import read_fields

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# What may differ when a run is resumed: it changes how, not what, is computed.
FREE = ("launch.", "train.checkpoint.", "data.threads", "data.path")


@dataclass(frozen=True)
class Run:
    """What is to be trained, and where. A new one has no folder before `create`."""

    config: Config
    storage: Storage
    is_new: bool
    recipe: str | None = None  # as it was named

    @property
    def is_finished(self) -> bool:
        return not self.is_new and self.storage.exists(SUMMARY)

    def create(self) -> None:
        """The folder, there with its configuration or not at all: without it nobody could go on."""
        facts = yaml.safe_dump({"run": _facts(self.storage.name, self.recipe)}, sort_keys=False)
        content = (recipes.as_yaml(self.config) + facts).encode()
        if self.storage.local is None:
            self.storage.write(CONFIG, content)
            return
        begun = self.storage.parent / f".{self.storage.name}.{secrets.token_hex(4)}"
        assert begun.local is not None
        try:
            begun.write(CONFIG, content)
            _rename(begun.local, self.storage)
        finally:
            shutil.rmtree(begun.local, ignore_errors=True)
        sync(begun.local.parent)

    def forget(self) -> None:
        """A run that was created and refused before its first epoch leaves nothing."""
        measured = self.storage.exists(METRICS) and self.storage.read(METRICS)
        if self.is_new and not measured and not self.storage.names("checkpoints"):
            self.storage.remove("")

    def locked(self) -> AbstractContextManager[None]:
        return locked(self.storage, CONFIG, "trained")


@contextmanager
def locked(storage: Storage, file: str, done: str) -> Iterator[None]:
    """Nobody else on this machine does it meanwhile; an object store has no locks."""
    if storage.local is None:
        yield
        return
    with (storage.local / file).open("r+b") as held:  # NFS locks only what may be written to
        if not lock(held):
            raise InputError(f"{storage} is being {done} by another process")
        yield


def open_run(
    recipe: str | None, settings: Sequence[str], out: str, name: str | None, resume: bool
) -> Run:
    """The run that the command line asks for; one that exists is refused unless `resume`."""
    if resume:
        return _existing(recipe, settings, out, name)
    config = recipes.load(recipe or recipes.DEFAULT, settings)
    if name is None:
        stem, method = Path(recipe or recipes.DEFAULT).stem, config.method.name
        name = default_name(stem if method in stem.split("-") else f"{stem}-{method}")
    storage = folder(out, name)
    if storage.exists(CONFIG):
        raise _exists(storage)
    if storage.names():
        raise InputError(f"{storage} holds other files: choose another --name or --out")
    return Run(config, storage, is_new=True, recipe=recipe or recipes.DEFAULT)


def _exists(storage: Storage) -> InputError:
    return InputError(f"{storage} exists: choose another --name, or continue it with --resume")


def _rename(begun: Path, storage: Storage) -> None:
    """To the run's folder, if there is none, or an empty one: somebody may have been faster."""
    try:
        begun.rename(str(storage.local))
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _exists(storage) from None
        raise


def _existing(recipe: str | None, settings: Sequence[str], out: str, name: str | None) -> Run:
    if name is None:
        raise InputError("--resume needs the --name of the run that is to be continued")
    storage = folder(out, name)
    if not storage.exists(CONFIG):
        raise InputError(f"{storage} is not a run, it has no {CONFIG}: check --out and --name")
    fields = read_fields(storage)
    stored = recipes.resolve(fields, where=str(storage / CONFIG))
    asked = (
        recipes.load(recipe, settings)
        if recipe is not None
        else recipes.resolve(fields, settings, where=str(storage / CONFIG))
    )
    differ = [
        f"{path} is {new!r} and was {old!r}"
        for path, old, new in differences(stored, asked)
        if not path.startswith(FREE)
    ]
    if differ:
        raise InputError(
            f"{storage} was started with another configuration ({'; '.join(differ)}): resume it "
            "without these settings, or start a new run with another --name"
        )
    return Run(asked, storage, is_new=False)


def default_name(after: str) -> str:
    """With the time; of a file's name only what a name may hold."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", after)[:80]
    return f"{plain}-{datetime.datetime.now():%Y%m%d-%H%M%S}".lstrip("._-")


def differences(old: Config, new: Config) -> Iterator[tuple[str, Any, Any]]:
    """(path, old value, new value) of every field that differs."""
    before, after = (dict(flat(config)) for config in (old, new))
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            yield path, before.get(path), after.get(path)


def flat(config: Config) -> Iterator[tuple[str, Any]]:
    """The configuration as a.b → value."""
    return flatten(config.model_dump(mode="json"))


def folder(out: str, name: str) -> Storage:
    """Of a run or a sweep."""
    if not NAME.fullmatch(name):
        raise InputError(f"--name is {name!r}: give at most 100 letters, digits, '.', '_' and '-'")
    return Storage(out) / name


def _facts(name: str, recipe: str | None) -> dict[str, Any]:
    """Where a run comes from: enough to run it again."""
    packages = ("dps_dist", "torch", "torchvision", "ray", "ffcv", "numpy", "pyarrow")
    return {
        "name": name,
        "recipe": recipe,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": without_secrets(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "revision": _revision(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def _revision() -> str | None:
    """The git revision of this package, if it runs from a clone; '+' if files were changed."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", str(here)],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("DPS_REVISION")  # an image is built without the clone
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
