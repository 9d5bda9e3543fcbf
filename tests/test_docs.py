"""What README and docs show is run: each Python block, where the digits are prepared."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_cards_of_the_methods_are_up_to_date():
    written = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    remedy = "run `python -m dps_dist.methods.cards > docs/methods.md`"
    assert written == cards(), remedy
