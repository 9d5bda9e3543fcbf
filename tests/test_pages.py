"""The pages' commands, typed from top to bottom of each page on a real cluster with small data.

What makes them small is added at their end, where it wins: one epoch, a small network, two workers,
two cells of a grid. Paths and addresses of the reader's are those of the test. What stands in
ELSEWHERE is run by something else, or can only be looked at here (tests/checked.py).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import typer.main

from dps_dist.cli import app, main
from tests import shown
from tests.conftest import write_photos
from tests.data.test_sources import write_cifar
from tests.launch.cluster import RAY, Cluster
from tests.launch.training import DPS, PATIENCE_S, short_home
from tests.shown import PAGES, ROOT

ELSEWHERE = {
    "make": "the runs of `make demo` are made below; `make test` is this",
    "pip": "makes the environment that this runs in",
    "deploy/reproduce/": "tests/deploy/test_reproduce.py runs them, small",
    "docker": "docker/verify.sh builds the image and runs it; what `exec` is given is typed",
    "sbatch": "deploy/slurm/verify.sh, on a real Slurm",
    "kubectl": "no Kubernetes here: what it is given is built and checked",
    "kustomize": "changes a file of the repository",
    "nft": "closes the machine's network",
    "ssh": "goes to another machine",
    "install": "gives a file to another user",
    "./certificate.sh": "tests/deploy/test_ray.py runs it",
    "prometheus": "tests/launch/test_telemetry.py runs it",
    "ray get-auth-token": "the cluster has a token",
    "ray start": "tests/deploy/test_ray.py starts it so",
    "ray job list": "on a cluster in Kubernetes",
    "ray job logs --address http://localhost:8265": "the same",
    **dict.fromkeys(("export", "source", "git", "cd", "id", "printf"), "set variables"),
    **dict.fromkeys(("head", "base64", "chmod"), "make a token"),
}
FEW_PIXELS = ["model={name: small_cnn, stem: 3x3}", "data.resolution=32", "data.batch_size=8"]
SMALL = [*FEW_PIXELS, "train.amp=none", "launch.cpus_per_worker=1"]
SMALLER = {
    "digits": ["train.epochs=3"],
    "cifar10": [*SMALL, "train.epochs=1"],
    "cifar100": [*SMALL, "train.epochs=1"],
    "imagenet": [*SMALL, "train.epochs=1", "optim.warmup_epochs=0"],
}
WINS = {"--workers": "2", "--workers-per-trial": "1", "--trials": "2"}
TRAINS = ("dps train", "dps submit", "python tune/")
NAMED = ("--out", "--name")
PROGRAMS = {"dps": DPS, "ray": RAY}
TRAINED = set()  # what a page before has trained in the same words


def plain(command):
    """As one types it, or as what one types hands it on: `docker exec`."""
    words = list(command.words)
    if words[0] == "docker" and "exec" in words and "dps" in words:
        words = words[words.index("dps") :]
    return words


def typed_here(words):
    line = " ".join(words) + " "
    return not any(
        line.startswith(start if start[-1] == "/" else f"{start} ") for start in ELSEWHERE
    )


def made_smaller(words):
    """The command, and after it what makes it small."""
    line = " ".join(words)
    if not any(start in line for start in TRAINS) or "--resume" in words:
        return words
    recipe = re.search(r"(?:dps train|dps submit|\.py) ([a-z]\w*)", line)
    more = [w for one in SMALLER[recipe[1] if recipe else "digits"] for w in ("--set", one)]
    more += [word for pair in WINS.items() if pair[0] in words for word in pair]
    if "tune/" in line:
        more += ["--hold-out", "2", *(("--set", "data.batch_size=2") if "cifar" in line else ())]
    if "ablation.py" in line:
        more += ["--gamma", ".9,1", "--c", "10", "--seeds", "1"]
    return [*words, *more]


class Typist:
    """In a folder of a page's own, with the data and the runs that the page takes to be there."""

    def __init__(self, folder, small, cluster, finished=None):
        self.folder, self.small, self.cluster, self.finished = folder, small, cluster, finished
        (folder / "data").mkdir(parents=True)
        for made in (small / "data").iterdir():
            (folder / "data" / made.name).symlink_to(made)
        (folder / "data/digits").unlink()
        shutil.copytree(small / "data/digits", folder / "data/digits")  # an audit writes there
        (folder / "docs/results").mkdir(parents=True)
        (folder / "plans").mkdir()  # where nothing is prepared
        shutil.copy(ROOT / ".gitignore", folder)  # data does not go with a job
        shutil.copytree(ROOT / "tune", folder / "tune")  # which goes with a job
        (folder / "plans/my.yaml").write_text("extends: imagenet-resnet152\n")

    def type(self, words, here=None):
        """here: a `dps` that does not start another process for what needs none."""
        words = [self.place(word) for word in made_smaller(words)]
        self.make_room(words)
        if words[0] == "dps" and words[1] not in ("train", "submit"):
            for word in words[2:]:
                self.there(word, words)
            if words[1] == "export":
                shutil.rmtree(self.folder / words[3], ignore_errors=True)
            words = [name for word in words for name in self.globbed(word)]
            return here(self.folder / ("plans" if words[1] == "plan" else ""), *words[1:])
        if words[0] == "python":
            words = [sys.executable, ROOT / words[1], *words[2:]]
        elif words[0] in ("mkdir", "ln", "cp"):
            words = ["bash", "-c", " ".join(words)]
        else:
            words = [PROGRAMS[words[0]], *words[1:]]
        return done(words, self.folder, self.cluster.env | {"RAY_ADDRESS": self.cluster.gcs})

    def place(self, word):
        """What is the reader's, here."""
        word = re.sub(r"(?<![\w.])/(datasets|data)/", rf"{self.small}/\1/", word)
        word = re.sub(r"(?<![\w.])/shared/", f"{self.folder}/shared/", word)
        word = word.replace("s3://bucket/", f"{self.folder}/bucket/")
        return re.sub(r"http://[\w.]+:8265", self.cluster.address, word)

    def make_room(self, words):
        """A page may begin the same run in several ways."""
        if "--name" in words and "--resume" not in words:
            out, name = (words[words.index(one) + 1] if one in words else "runs" for one in NAMED)
            shutil.rmtree(self.folder / out / name, ignore_errors=True)

    def there(self, word, words):
        """A run that a page takes for finished."""
        path = self.folder / word.replace("*", "dps-sym40").replace("[012]", "0")
        if not word.startswith("runs/") or word == "runs/*" or path.exists():
            return
        kind = "second" if "--on" in words else "baseline" if "baseline" in word else "dps"
        shutil.copytree(self.finished / kind, path)

    def globbed(self, word):
        found = sorted(self.folder.glob(word)) if re.search(r"[*\[]", word) else []
        return [str(path.relative_to(self.folder)) for path in found] or [word]


def done(words, folder, env):
    ended = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def small(digits, tmp_path_factory):
    """Data as the pages have them, of a few images."""
    root = tmp_path_factory.mktemp("small")
    write_photos(root / "datasets/imagenet", per_class=8)
    for name in ("cifar10", "cifar100"):
        write_cifar(root / "datasets", name, "binary")
        folder = root / "datasets" / ("cifar-10-batches-bin" if name == "cifar10" else "")
        done([DPS, "prepare", name, root / "data" / name, "--from", folder], root, os.environ)
    tree = ["imagefolder", root / "data/imagenet", "--from", root / "datasets/imagenet"]
    done([DPS, "prepare", *tree], root, os.environ)
    (root / "data/digits").symlink_to(digits)
    (root / "data/svhn").symlink_to(root / "data/cifar10")
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), np.uint8)
    for name in ("CIFAR-10-C", "CIFAR-10-P"):
        (root / "data" / name).mkdir()
    np.save(root / "data/CIFAR-10-C/labels.npy", np.arange(20, dtype=np.uint8) % 10)
    np.save(root / "data/CIFAR-10-C/fog.npy", images)
    np.save(root / "data/CIFAR-10-P/tilt.npy", images.reshape(4, 5, 32, 32, 3))
    return root


@pytest.fixture(scope="module")
def cluster():
    with short_home() as home:
        made = Cluster(home, cpus=(2,))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def finished(small, cluster, tmp_path_factory):
    """What `make demo` leaves, and a run on CIFAR-10."""
    typist = Typist(tmp_path_factory.mktemp("finished"), small, cluster)
    dry = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True)
    commands = [line.removeprefix(".venv/bin/") for line in dry.stdout.splitlines()]
    trains = [line for line in commands if line.startswith("dps train")]
    assert len(trains) == 2
    second = "dps train cifar10-resnet18 --workers 2 --name second --out runs/demo"
    for line in (*trains, second):
        typist.type(shlex.split(line))
    TRAINED.add(tuple(shlex.split(second.removesuffix(" --out runs/demo"))))
    TRAINED.add(("dps", "train", "digits-sym40"))
    return typist.folder / "runs/demo"


@pytest.fixture
def here(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")

    def run(folder, *words):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["dps", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert not ended.value.code, f"{words}: {said.out}{said.err}"
        return said.out

    return run


def typed_of(page):
    return [words for words in map(plain, shown.in_blocks(page)) if typed_here(words)]


def test_every_command_stands_on_some_page():
    """Nothing is left out by a mistake in how pages are read."""
    typed = {words[1] for page in PAGES for words in typed_of(page) if words[0] == "dps"}
    assert typed == set(typer.main.get_command(app).commands)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", list(filter(typed_of, PAGES)), ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_can_be_typed(page, request, here, tmp_path):
    commands = typed_of(page)
    typist = Typist(
        tmp_path / "page", *map(request.getfixturevalue, ("small", "cluster", "finished"))
    )
    for words in dict.fromkeys(map(tuple, commands)):
        if words in TRAINED:
            continue
        said = typist.type(list(words), here)
        assert said or words[0] in ("mkdir", "ln", "cp"), words
        if any(start in " ".join(words) for start in TRAINS):
            TRAINED.add(words)
