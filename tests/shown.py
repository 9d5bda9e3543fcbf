"""The commands that the pages, and the examples of `--help`, show."""

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import typer.main

from dps_dist.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docker/README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("README.md")),
]
SHELL = ("bash", "sh", "shell", "console")
A_NAME = "01"  # what stands for a NAME: a number that nobody writes so
BETWEEN, REDIRECTED = set("();|&\n"), set("<>")


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    page: Path
    env: tuple[str, ...] = ()  # variables that are set for this command alone

    def file(self, name: str) -> Path:
        """Pages are read in their own folder or in the repository's."""
        found = [folder / name for folder in (self.page.parent, ROOT) if (folder / name).exists()]
        assert found, f"{name} is not in this repository"
        return found[0]

    def after(self, *options: str) -> list[str]:
        """The values of an option, `-f a` or `-f=a`."""
        pairs = zip(self.words, self.words[1:], strict=False)
        spaced = [value for option, value in pairs if option in options]
        return spaced + [
            word.removeprefix(f"{option}=")
            for option in options
            for word in self.words
            if word.startswith(f"{option}=")
        ]

    def inner(self, words: tuple[str, ...] | list[str]) -> "Command":
        return Command(tuple(words), self.page)


def fences(text: str) -> list[tuple[str, str]]:
    """Language and text of each block."""
    return re.findall(r"^ *```([^\n`]*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)


def of_shell(text: str, page: Path) -> Iterator[Command]:
    """The commands of a text, also those in `$(…)` and in a variable that is called."""
    plain = re.sub(r"(^|[ \t])#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    for inside in re.findall(r"\$\(([^()]*)\)", plain):
        yield from of_shell(inside, page)
    plain = re.sub(r"\$\([^()]*\)", "VALUE", plain)
    lexer = shlex.shlex(plain, posix=True, punctuation_chars="".join(BETWEEN | REDIRECTED))
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    held: dict[str, list[str]] = {}
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if not set(word) <= BETWEEN:
            words.append(word)
            continue
        given, words = words, []
        for k in reversed([k for k, one in enumerate(given) if set(one) <= REDIRECTED]):
            del given[k : k + 2]
        env = []
        while given and (assigned := re.fullmatch(r"(\w+)=(.*)", given[0], re.DOTALL)):
            held["$" + assigned[1]] = assigned[2].split()
            env.append(assigned[1])
            del given[0]
        if given:
            yield Command((*held.get(given[0], given[:1]), *given[1:]), page, tuple(env))


def in_blocks(page: Path) -> Iterator[Command]:
    for language, block in fences(page.read_text()):
        if language.strip() in SHELL:
            yield from of_shell(re.sub(r"^\$ ", "", block, flags=re.MULTILINE), page)


def in_sentences(page: Path) -> Iterator[Command]:
    """Between backquotes, up to a …; NAMES stand for a value."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", text):
        begin = " ".join(span.split("…")[0].split()).removeprefix("taskset -c 1 ")
        if re.match(r"[a-z][\w./-]* ", begin):
            named = re.sub(r"(?<= )[A-Z]+(?= |$)", A_NAME, begin)
            if (ROOT / "benchmarks" / begin.split()[0]).exists():  # so a table calls them
                named = f"python benchmarks/{named}"
            with suppress(ValueError):  # no closing quotation: no command
                yield from of_shell(named, page)


def in_help() -> Iterator[Command]:
    apps = [app, *(script(file).app for file in sorted((ROOT / "tune").glob("*.py")))]
    for one in apps:
        group = typer.main.get_command(one)
        for own in getattr(group, "commands", {"": group}).values():
            for line in (own.epilog or "").splitlines()[1:]:
                yield from of_shell(line.strip(), ROOT / "--help")


@cache
def script(file: Path) -> ModuleType:
    with patch.object(sys, "path", [str(file.parent), *sys.path]):
        spec = importlib.util.spec_from_file_location(f"shown_{file.parent.name}_{file.stem}", file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
