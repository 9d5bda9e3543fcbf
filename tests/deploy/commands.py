"""`dps …` as files of deploy/ write it, read by the command line itself, and its recipe."""

import subprocess
from pathlib import Path
from typing import Any

import typer.main

from dps_dist import recipes
from dps_dist.cli.base import app
from dps_dist.config import Config

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


def words_of(line: str, runs: Path | None = None) -> list[str]:
    """A line as a shell splits it, with /runs standing for another folder."""
    moved = line.replace("/runs/", f"{runs}/") if runs else line
    shown = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {moved}"], capture_output=True, text=True, check=True
    )
    return shown.stdout.splitlines()


def parsed(words: list[str]) -> dict[str, Any]:
    """The command's name and options, validated but not run; SystemExit or an error if wrong."""
    program, name, *options = words
    assert program == "dps", words
    command = typer.main.get_command(app).commands[name]
    context = command.make_context(name, options)
    return {"command": name, **context.params}


def config_of(options: dict[str, Any]) -> Config:
    """The configuration that `dps train` would run."""
    workers = [f"launch.workers={options['workers']}"] if options.get("workers") else []
    return recipes.load(options["recipe"], [*(options["settings"] or ()), *workers])
