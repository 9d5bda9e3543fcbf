"""What README and docs show is run: each Python block, where the digits are prepared.

Every command can be typed so: tests/checked.py asks the program, or looks for what it is given.
"""

import re
import subprocess
import sys

import pytest

from dps_dist import recipes
from dps_dist.config import fields
from dps_dist.launch.runs import flat
from dps_dist.methods.cards import cards
from tests import checked, shown
from tests.shown import PAGES, ROOT

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


def shown_by(find, page):
    for command in find(page):
        yield pytest.param(command, id=f"{page.relative_to(ROOT)}: {' '.join(command.words)}")


@pytest.mark.parametrize(
    "command",
    [one for page in PAGES for one in shown_by(shown.in_blocks, page)]
    + [pytest.param(one, id=f"--help: {' '.join(one.words)}") for one in shown.in_help()],
)
def test_commands_can_be_typed(command):
    checked.check(command)


@pytest.mark.parametrize(
    "command", [one for page in PAGES for one in shown_by(shown.in_sentences, page)]
)
def test_commands_in_sentences_can_be_typed(command):
    checked.check_named(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_stands_in_a_block_that_is_not_looked_at(page):
    for language, block in shown.fences(page.read_text()):
        assert language.split(" ")[0] in (*shown.SHELL, "python", "py", "yaml", "dockerfile", "")
        if not language:
            first = set(re.findall(r"^(?:\$ )?(\S+) \S", block, re.MULTILINE))  # no table's cell
            assert not first & {*checked.CHECKS, *checked.UNCHECKED}, "say ```bash"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("dps audit runs/a --html", "requires an argument"),
        ("dps audit", "Missing"),
        ("dps audits runs/a", "No such command"),
        ("cd docs && dps report runs/a --colour red", "No such option"),
        ("dps train digits-dlbb", "dlbb is not a part"),
        ("dps train digits --set train.epoch=1", "train.epoch is not a field"),
        ("x=$(dps trian digits)", "No such command"),
        ("call='dps train'\n$call --colour red", "No such option"),
        ("python tune/ablation.py digits --gama 1", "No such option"),
        ("dps plan digits --nodes 1 --gpus-per-node 1000", "data.batch_size is only"),
        ("python benchmarks/nothing.py", "not in this repository"),
        ("ray job submit --address http://head:8265 -- dps trian", "No such command"),
        ("ray job submti -- dps train", "No such command"),
        ("DPS_NAMES=a sbatch deploy/slurm/dps.sbatch digits", "DPS_NAMES"),
        ("sbatch deploy/slurm/dps.sbatch digits --worker 2", "No such option"),
        ("kubectl apply -k deploy/kuberay/overlays/nothing", "not in this repository"),
        ("kubectl -n nowhere get rayjob dps", "nowhere"),
        ("kubectl -n dps get rayjob other", "other"),
        ("docker compose exec head dps trian", "No such command"),
        ("docker compose exec nobody dps doctor", "nobody"),
        ("docker build -f docker/Dockerfile --build-arg NOTHING=1 .", "NOTHING"),
        ("prometheus --config.file=deploy/nothing.yml", "not in this repository"),
        ("deploy/reproduce/imagenet.sh --images x --rows nothing", "nothing is not a part"),
        ("deploy/reproduce/imagenet.sh --image x", "--image is not an option"),
        ("pip install 'dps_dist[nothing]'", "nothing"),
        ("true | terraform apply", "nothing checks true"),
    ],
)
def test_commands_that_cannot_be_typed_are_seen(line, why):
    with pytest.raises(Exception, match=re.compile(re.escape(why), re.IGNORECASE)):
        for command in shown.of_shell(line, ROOT / "README.md"):
            checked.check(command)


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "python benchmarks --colour red",
        "python benchmarks --only nothing",
        "python benchmarks/loader.py --colour red",
    ],
)
def test_programs_that_refuse_are_heard(line):
    (command,) = shown.of_shell(line, ROOT / "README.md")
    with pytest.raises((SystemExit, subprocess.CalledProcessError)):
        checked.check(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_architecture_names_every_file():
    """A folder stands for all that is in it; names after the first are in its folder."""
    page, named = (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), set()
    for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        named |= {ROOT / first, *((ROOT / first).parent / other for other in others)}
    assert [path for path in named if not path.exists()] == []
    modules = [path for path in (ROOT / "dps_dist").rglob("*.py") if path.name != "__init__.py"]
    assert [path for path in modules if not named & {path, *path.parents}] == []


def test_the_page_of_fields_is_up_to_date():
    written = (ROOT / "docs/fields.md").read_text(encoding="utf-8")
    assert written == fields.page(), "run `python -m dps_dist.config.fields > docs/fields.md`"
    named = set(re.findall(r"^\| `(.*?)`", written, re.MULTILINE))
    known = {path for path, _ in flat(recipes.load("digits")) if not path.startswith("method.")}
    assert known <= named
    for path, default in re.findall(r"^\| `(.*?)` \| (.*?) \|", written, re.MULTILINE):
        if not path.startswith("data.progressive."):  # which is null, and then has no fields
            recipes.resolve({}, [f"{path}={default}"], where=path)


def test_recipes_that_are_shown_resolve(tmp_path):
    shown_ones = [
        block
        for page in PAGES
        for language, block in shown.fences(page.read_text())
        if language == "yaml" and block.startswith("extends:")
    ]
    assert shown_ones
    for text in shown_ones:
        (tmp_path / "mine.yaml").write_text(text)
        recipes.load(str(tmp_path / "mine.yaml"))


def test_the_cards_of_the_methods_are_up_to_date():
    written = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    remedy = "run `python -m dps_dist.methods.cards > docs/methods.md`"
    assert written == cards(), remedy
