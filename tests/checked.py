"""How a command that a page shows is checked, program by program.

Nothing is trained: `dps` and the scripts read their options themselves and resolve the recipe; of
other programs it is seen that what they are given is in this repository.
"""

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import typer.main
import yaml
from typer.testing import CliRunner

from dps_dist import recipes
from dps_dist.cli import app
from tests.deploy import kustomize
from tests.shown import A_NAME, ROOT, Command, script


def parsed(command: Any, words: list[str], name: str) -> dict[str, Any]:
    """Options and arguments are read and checked as the command does, and nothing is run."""
    context = command.make_context(name, list(words))
    while hasattr(context.command, "resolve_command"):
        left = [*getattr(context, "_protected_args", []), *context.args]
        if not left:  # a command with commands below it that also is one by itself
            break
        name, command, rest = context.command.resolve_command(context, left)
        context = command.make_context(name, rest, parent=context)
    return context.params


def resolve(options: dict[str, Any]) -> None:
    """The recipe with its settings, if it is a name; files are the reader's."""
    recipe = options.get("recipe") or ""
    if re.fullmatch(r"[a-z][a-z0-9_-]*", recipe):
        workers = [f"launch.workers={options['workers']}"] if options.get("workers") else []
        recipes.load(recipe, [*(options.get("settings") or ()), *workers])


def dps(command: Command) -> None:
    words = list(command.words[1:])
    resolve(parsed(typer.main.get_command(app), words, "dps"))
    readers_own = {A_NAME, "my.yaml"} & set(words)
    if words[0] in ("sources", "recipes", "plan") and not readers_own:  # all they do is print
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{done.output}{done.exception}"


class ParsedError(Exception):
    """Raised where a script has its options and would begin."""


def python(command: Command) -> None:
    name, *options = command.words[1:]
    if name == "-m":
        assert importlib.util.find_spec(options[0]), options[0]
        return
    file = command.file(name)
    module = script(file / "__main__.py" if file.is_dir() else file)
    if file.parent.name == "tune":
        options_of = parsed(typer.main.get_command(module.app), options, name)
        resolve({key: value for key, value in options_of.items() if key != "workers"})
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser) -> None:
        parse(parser, options)
        raise ParsedError

    with patch.object(argparse.ArgumentParser, "parse_args", parse_only):
        try:
            module.main()
        except ParsedError:
            return
    raise AssertionError(f"{name} has begun without its options")


def dry_run(command: Command) -> None:
    """A script of deploy/reproduce prints commands, which are checked in turn."""
    call = [str(command.file(command.words[0])), *command.words[1:], "--dry-run"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        check(command.inner(shlex.split(line)[1:]))


def make(command: Command) -> None:
    call = ["make", "--dry-run", "--directory", str(ROOT), *command.words[1:]]
    subprocess.run(call, check=True, capture_output=True)


def ray(command: Command) -> None:
    with warnings.catch_warnings():  # it imports all of Ray, parts of which warn of themselves
        warnings.simplefilter("ignore")
        from ray.scripts.scripts import cli
    words = list(command.words[1:])
    if "--" in words:
        check(command.inner(words[words.index("--") + 1 :]))
    if words[0] in ("up", "down"):
        assert all(command.file(name) for name in words[1:])
    parsed(cli, words, "ray")


def sbatch(command: Command) -> None:
    k = [word.endswith(".sbatch") for word in command.words].index(True)
    text = command.file(command.words[k]).read_text()
    assert all(name in text for name in command.env), command.env
    dps(command.inner(["dps", "train", *command.words[k + 1 :]]))


def manifests() -> Iterator[dict[str, Any]]:
    for file in (ROOT / "deploy/kuberay").rglob("kustomization.yaml"):
        yield from kustomize.build(file.parent)


def kubectl(command: Command) -> None:
    for folder in command.after("-k"):
        assert kustomize.build(command.file(folder))
    for space in command.after("-n"):
        assert any(doc["metadata"].get("namespace") == space for doc in manifests()), space
    verbs = {"apply", "delete", "get", "kustomize", "logs", "patch", "port-forward", "wait"}
    verb = next(word for word in command.words[1:] if word in verbs)
    rest = command.words[command.words.index(verb) + 1 :]
    pairs = [rest[:2], *(tuple(word.split("/")) for word in rest)]
    known = {(doc["kind"].lower(), doc["metadata"]["name"]) for doc in manifests()}
    if verb in ("get", "wait", "delete") and "$" not in "".join(rest) and "-k" not in rest:
        assert any(pair in known for pair in pairs), rest
    for changes in command.after("-p"):
        (cluster,) = [doc for doc in manifests() if doc["kind"] == "RayCluster"]
        for change in json.loads(changes):
            kustomize.apply(cluster, **change)


def docker(command: Command) -> None:
    dockerfile, entry = (ROOT / "docker" / name for name in ("Dockerfile", "entrypoint.sh"))
    for file in command.after("-f"):
        assert command.file(file) == dockerfile
    for argument in command.after("--build-arg"):
        assert f"ARG {argument.split('=')[0]}" in dockerfile.read_text(), argument
    for variable in command.after("--env"):
        assert variable.split("=")[0] in entry.read_text(), variable
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    for scaled in command.after("--scale"):
        assert scaled.split("=")[0] in services, scaled
    words = list(command.words)
    if words[1:3] == ["compose", "exec"]:
        assert words[3] in services, words[3]
    started = [k for k, word in enumerate(words) if word.startswith("dps-dist:")]
    if words[1] == "run" and words[started[0] + 1] != "dps":
        assert f"\n{words[started[0] + 1]})\n" in entry.read_text(), words
    elif words[1] != "build" and "dps" in words:
        check(command.inner(words[words.index("dps") :]))


def files(command: Command) -> None:
    """Programs that tests run on these files, or that take nothing else of ours."""
    for file in [*command.after("--config.file"), *command.words[1:]]:
        if "/" in file and not file.startswith(("-", "/", "~")):
            command.file(file)


def folder(command: Command) -> None:
    assert command.file(command.words[1]).is_dir()


def certificate(command: Command) -> None:
    command.file(command.words[0])
    assert len(command.words) > 2, "a folder, and the names of a node"


def pip(command: Command) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:dps_dist|\.)\[([\w,]+)\]", " ".join(command.words)):
        for extra in extras.split(","):
            assert extra in project["optional-dependencies"], extra
    for file in command.after("--constraint"):
        command.file(file)


CHECKS: dict[str, Callable[[Command], None]] = {
    "dps": dps,
    "python": python,
    "make": make,
    "ray": ray,
    "sbatch": sbatch,
    "kubectl": kubectl,
    "docker": docker,
    "prometheus": files,  # tests/launch/test_telemetry.py runs it with this file
    "promtool": files,  # and this
    "cd": folder,
    "./certificate.sh": certificate,  # tests/deploy/test_ray.py runs it
    "pip": pip,
}

# What nothing of this repository can make wrong
UNCHECKED = {
    "nft": "needs root, and closes the machine's network",
    "ssh": "goes to another machine",
    "install": "gives a file to another user",
    "kustomize": "changes a file of the repository, for a registry that is the reader's",
    **dict.fromkeys(("mkdir", "ln", "cp"), "tests/report/test_audit.py does what they do"),
    **dict.fromkeys(("head", "base64", "chmod"), "make a token"),
    **dict.fromkeys(("export", "source", "printf", "id", "git"), "set variables"),
}


def check(command: Command) -> None:
    program = command.words[0]
    if program.startswith("deploy/reproduce/"):
        dry_run(command)
    elif program not in UNCHECKED:
        assert program in CHECKS, f"nothing checks {program}: see tests/checked.py"
        CHECKS[program](command)


def check_named(command: Command) -> None:
    """In a sentence: a program of ours, which may be named without what it needs."""
    program, *words = command.words
    if program not in CHECKS and not program.startswith("deploy/"):
        return
    if program in ("sbatch", "kubectl") and not any("/" in word or word == "-n" for word in words):
        return
    try:
        check(command)
    except Exception as error:
        if type(error).__name__ not in ("MissingParameter", "BadOptionUsage"):
            raise
