"""What README and docs show is run: each Python block, where the digits are prepared.

Of commands it is seen that they can be typed so.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dps_dist.cli import app
from dps_dist.methods.cards import cards

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(kind, block, id=f"{page.name}-{k}")
    for page in PAGES
    for k, (kind, block) in enumerate(
        re.findall(r"```python( torchrun)?\n(.*?)```", page.read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_python_blocks_run(kind, block, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/digits").symlink_to(digits)
    if not kind:
        exec(compile(block, "block", "exec"), {})
        return
    (tmp_path / "train.py").write_text(block)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "train.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def commands():
    """The lines of shell blocks, and of the examples in --help, that begin with dps."""
    blocks = [
        (page.name, block)
        for page in PAGES
        for block in re.findall(
            r"```(?:bash|sh|shell|console)\n(.*?)```", page.read_text(), re.DOTALL
        )
    ]
    blocks += [
        ("--help", own.epilog or "") for own in typer.main.get_command(app).commands.values()
    ]
    for where, block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            if words[:1] == ["dps"]:
                yield pytest.param(words[1:], id=f"{where}: {' '.join(words)}")


def parsed(words):
    """Options and arguments are read and checked as the command does, and nothing is run."""
    command = typer.main.get_command(app)
    context = command.make_context("dps", list(words))
    while left := [*getattr(context, "_protected_args", []), *context.args]:
        name, command, rest = context.command.resolve_command(context, left)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("words", list(commands()))
def test_commands_can_be_typed(words):
    parsed(words)


@pytest.mark.parametrize(
    "words", ["audit runs/a --html", "audit", "audits runs/a", "report runs/a --colour red"]
)
def test_commands_that_cannot_be_typed_are_seen(words):
    with pytest.raises(Exception, match=r"(?i)argument|missing|no such"):
        parsed(words.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_cards_of_the_methods_are_up_to_date():
    written = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    remedy = "run `python -m dps_dist.methods.cards > docs/methods.md`"
    assert written == cards(), remedy
