"""`dps` as it is typed: what it prints, and one sentence with exit code 2 for every mistake."""

import io
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from PIL import Image

from dps_dist import recipes
from dps_dist.cli import main
from dps_dist.cli.base import say
from dps_dist.data import manifest as manifests
from dps_dist.recipes import paper
from tests.conftest import write_photos
from tests.data.test_sources import write_cifar


@pytest.fixture
def dps(monkeypatch, capfd, tmp_path):
    """Run the command in an empty folder; → (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["dps", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run


def assert_sentence(result, *parts):
    code, _, err = result
    said = err.strip().splitlines()[-1]
    assert code == 2, err
    assert said.startswith("dps: "), err
    assert "Traceback" not in err
    for part in parts:
        assert part in said


def test_prepare_preview_and_check(dps, tmp_path):
    code, out, _ = dps("prepare", "digits", "data/my digits")
    assert code == 0 and "train.beton: 1,200 images" in out and "val.beton: 597 images" in out
    assert manifests.read("data/my digits", "train").prepared["images"]["mode"] == "raw"
    before = Path("data/my digits/train.beton").stat()
    code, out, _ = dps("prepare", "digits", "data/my digits")
    assert code == 0 and out.count("already prepared") == 2
    assert Path("data/my digits/train.beton").stat().st_mtime_ns == before.st_mtime_ns
    code, out, _ = dps("prepare", "digits", "data/my digits", "--force", "--split", "train")
    assert code == 0 and Path("data/my digits/train.beton").stat().st_ino != before.st_ino
    own = ("--set", "data.path=data/my digits")
    code, out, _ = dps("preview", "digits-sym40", *own, "--set", "augment.pad=2")
    assert code == 0 and Path("preview.png").exists()
    code, out, _ = dps("preview", *own, "--out", "batch.png")
    assert code == 0 and "1,200 images, 10 classes" in out
    with Image.open("batch.png") as picture:
        assert picture.width > 800 and len(picture.convert("L").getcolors()) > 10
    code, out, _ = dps("doctor", "--data", "data/my digits")
    assert code == 0 and "2 files whole" in out
    assert_sentence(dps("preview", *own, "--set", "data.hold_out=1200"), "data.hold_out is 1200")
    mistyped = dps("prepare", "digts", "data/my digits")
    assert_sentence(mistyped, "source 'digts' is not known: choose one of imagefolder")

    beton = Path("data/my digits/train.beton")
    content = bytearray(beton.read_bytes())
    content[9_000_000] ^= 1
    beton.write_bytes(content)
    assert_sentence(dps("doctor", "--data", "data/my digits"), "train.beton is damaged", "--force")


def test_prepare_images_of_folders(dps, tmp_path):
    write_photos(tmp_path / "photos", per_class=4)
    code, out, _ = dps("prepare", "imagefolder", "out", "--from", "photos", "--max-side", 64)
    assert code == 0 and "train.beton: 8 images" in out
    assert manifests.read("out", "train").prepared["images"]["mode"] == "mixed"
    code, out, _ = dps("prepare", "imagefolder", "one", "--from", "photos", "--split", "val")
    assert code == 0 and sorted(p.name for p in Path("one").iterdir()) == [
        "val.beton",
        "val.parquet",
    ]


def test_prepare_cifar_or_a_part_of_it(dps, tmp_path):
    write_cifar(tmp_path / "downloads", "cifar10", "binary")
    words = ("prepare", "cifar10", "data/cifar10", "--from", "downloads")
    code, out, _ = dps(*words)
    assert code == 0 and "train.beton: 20 images" in out and "val.beton: 4 images" in out
    words = ("prepare", "cifar10", "data/cifar10-7", "--from", "downloads", "--train-images", 7)
    code, out, _ = dps(*words)
    assert code == 0 and "train.beton: 7 images" in out and "val.beton: 4 images" in out


def test_prepare_lists_every_bad_image(dps, tmp_path):
    root = write_photos(tmp_path / "photos", per_class=4)
    (root / "train/n01/000.JPEG").write_bytes(b"\xff\xd8\xff")
    (root / "train/n02/001.JPEG").write_text("text")
    code, out, err = dps("prepare", "imagefolder", "out", "--from", "photos")
    assert_sentence((code, out, err), "2 of 8 images cannot be read", "--skip-bad")
    assert "n01/000.JPEG" in out and "n02/001.JPEG" in out
    code, out, _ = dps("prepare", "imagefolder", "out", "--from", "photos", "--skip-bad")
    assert code == 0 and "6 images" in out


def test_a_full_disk_is_named_with_what_to_do(dps, digits, small_disk):
    (small_disk / "other").write_bytes(bytes((2 << 20) - 4096))
    picture = small_disk / "batch.png"
    words = ("preview", "--set", f"data.path={digits}", "--out", picture)
    assert_sentence(dps(*words), f"dps: {picture}: No space left", "make room there or choose")
    assert_sentence(dps("prepare", "digits", small_disk / "data"), str(small_disk), "make room")
    left = [path.name for path in small_disk.rglob("*") if path.is_file()]
    assert left == ["other"]


def test_a_folder_that_may_not_be_written_to_is_named_with_what_to_do(tmp_path):
    """By the command as a process of its own, for root without the right to ignore rights."""
    folder = tmp_path / "read only"
    folder.mkdir(mode=0o555)
    obey = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    command = [Path(sys.executable).with_name("dps"), "prepare", "digits", folder / "data"]
    call = [*(obey if os.geteuid() == 0 else []), *command]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 2 and not list(folder.iterdir())
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dps: {folder}/data: Permission denied: choose another place")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["prepare", "imagenet", "out"], ["'imagenet' is not known", "imagefolder"]),
        (["prepare", "cifar10", "out"], ["needs the folder", "--from", "cs.toronto.edu"]),
        (["prepare", "cifar10", "out", "--from", "nowhere"], ["nowhere does not exist"]),
        (["prepare", "digits", "out", "--quality", "0"], ["--quality is 0"]),
        (["prepare", "digits", "out", "--split", "test"], ["split 'test'", "train, val"]),
        (
            ["prepare", "digits", "out", "--train-images", "5", "--split", "val"],
            ["--train-images is 5, of the split train, and only val is prepared: leave it out"],
        ),
        (["evaluate", "run", "--on", "a=x", "--on", "a=y"], ["--on has a twice: give each a"]),
        (["preview"], ["data/digits/train.beton does not exist", "dps prepare"]),
        (["preview", "nothing"], ["recipe nothing does not exist"]),
        (["recipes", "show", "digits", "--set", "data.batch=1"], ["data.batch is not a field"]),
        (["recipes", "show", "digits", "--set", "data.path=a #1"], ["what follows ' #' is lost"]),
        (["train", "--workers", ""], ["launch.workers is null"]),
        (["train", "--name", "x" * 101], ["--name is 'xxx", "at most 100 letters"]),
        (["recipes", "show", "digit"], ["did you mean digits"]),
        (["recipes", "show", "digits-dlbb"], ["dlbb is not a part: did you mean dlb?"]),
        (["preview", "--out", "picture"], ["--out is picture", "preview.png"]),
        (["doctor", "--data", "nowhere"], ["nowhere holds no .beton"]),
    ],
)
def test_mistakes_get_a_sentence(dps, words, parts, tmp_path):
    assert_sentence(dps(*words), *parts)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_number_of_writers_is_refused(dps, tmp_path):
    code, _, err = dps("prepare", "digits", "out", "--workers", "-1")
    assert code == 2 and "--workers" in err and not list(tmp_path.iterdir())


def test_a_value_of_two_types_is_refused_once(dps):
    _, _, err = dps("recipes", "show", "digits", "--set", "launch.workers=1.5")
    assert err.count("launch.workers is 1.5") == 1
    code, _, err = dps("recipes", "show", "digits", "--set", "train.epochs={a: 1}")
    assert code == 2 and 'train.epochs is {"a": 1}' in err


def test_letters_that_the_terminal_lacks_are_no_traceback():
    command = [Path(sys.executable).with_name("dps"), "recipes", "--table"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=ascii_only)
    assert done.returncode == 0 and "?" in done.stdout and not done.stderr


@pytest.mark.parametrize("sigint", ["default_int_handler", "SIG_IGN"])
def test_sigterm_ends_a_command_as_ctrl_c_does(sigint):
    """Also one that a script runs in the background, where SIGINT is ignored."""
    code = f"""if True:
        import os, signal, time, typer
        from dps_dist.cli.base import run
        signal.signal(signal.SIGINT, signal.{sigint})
        app = typer.Typer()
        @app.command()
        def wait():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        run(app)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 143 and done.stderr.endswith("dps: stopped\n"), done.stderr


def test_defaults_stand_in_the_help(dps):
    _, out, _ = dps("train", "--help")
    assert "[default: digits]" in out


def test_a_folder_that_cannot_be_made_gets_a_sentence(dps, tmp_path):
    (tmp_path / "file").write_text("")
    assert_sentence(dps("prepare", "digits", "file/out"), "file/out", "Not a directory")


def test_prepared_data_needs_no_original(dps, tmp_path):
    write_photos(tmp_path / "photos", per_class=2)
    words = ("prepare", "imagefolder", "out", "--from", "photos")
    assert dps(*words)[0] == 0
    shutil.rmtree(tmp_path / "photos")
    code, out, _ = dps(*words)
    assert code == 0 and out.count("already prepared") == 2
    assert_sentence(dps(*words, "--force"), "photos does not exist")


def test_names_that_look_like_markup_are_printed_as_they_are(dps, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "photos/train" / name).mkdir(parents=True)
    (tmp_path / "photos/train/a/x[bold].png").write_text("no image")
    (tmp_path / "photos/train/b/[red].png").write_text("no image")
    (tmp_path / "photos/train/b/y:cat:.png").write_text("no image")
    _, out, _ = dps("prepare", "imagefolder", "out", "--from", "photos")
    assert "x[bold].png" in out and "b/[red].png" in out and "b/y:cat:.png" in out
    lines = io.StringIO()
    say("/data:cat:x", to=lines)
    assert lines.getvalue() == "/data:cat:x\n"


def test_ctrl_c_says_so(dps, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(recipes, "names", interrupted)
    code, _, err = dps("recipes")
    assert code == 130 and err.strip() == "dps: stopped"


def test_ctrl_c_during_the_imports_says_so():
    code = """if True:
        import os, signal, sys
        class Interrupting:
            def find_spec(self, name, *_):
                if name == "typer":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        from dps_dist.cli import main
        main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "dps: stopped\n")


def test_an_empty_class_folder_gets_a_sentence(dps, tmp_path):
    root = write_photos(tmp_path / "photos", per_class=2)
    for split in ("train", "val"):
        (root / split / "n03").mkdir()
    assert_sentence(dps("prepare", "imagefolder", "out", "--from", root), "n03 holds no image")


def test_recipes_are_listed_and_shown(dps):
    code, out, _ = dps("recipes")
    assert code == 0 and all(name in out for name in recipes.names())
    assert all(f" {part} " in out for part in recipes.parts())
    assert "joined by -" in out and "[…]" in out
    code, out, _ = dps("recipes", "show", "digits", "--set", "train.epochs=3")
    assert code == 0 and yaml.safe_load(out)["train"]["epochs"] == 3
    code, out, _ = dps("recipes", "show", "cifar10-resnet18-te-sym20")
    assert code == 0 and yaml.safe_load(out)["method"]["w_max"] == 300


def test_recipes_of_the_paper_are_named(dps, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = dps("recipes", "--table")
    lines = out.splitlines()
    assert code == 0 and sum(not line.startswith(" ") for line in lines) == len(paper.tables())
    named = set()
    for line in lines:
        if line.startswith(" ") and not line.endswith("only cited"):
            begin, _, rest = line.split()[-1].partition("{")
            named |= {begin + name for name in rest.removesuffix("}").split(",")}
    assert named == set(paper.recipes())
    assert "94.39" not in out and "±" not in out  # the paper's figures are not ours


def test_sources_are_listed(dps):
    code, out, _ = dps("sources")
    assert code == 0 and "cifar10-c" in out and "tinyimagenet" in out


def test_help_has_examples(dps):
    for command in ("prepare", "preview", "recipes", "doctor"):
        code, out, _ = dps(command, "--help")
        assert code == 0 and f"dps {command}" in out.split("Examples:")[1]


def test_doctor_finds_this_machine_fit(dps):
    code, out, _ = dps("doctor")
    assert code == 0
    for what in ("Python", "FFCV", "turbojpeg", "torch", "GPU", "bfloat16", "Ray", "disk"):
        assert what in out
    assert "bad" not in out


def test_doctor_says_what_is_broken(dps, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, _ = dps("doctor")
    assert code == 1 and "bad" in out and "make setup" in out


def test_version(dps):
    code, out, _ = dps("--version")
    assert code == 0 and out.split() == ["dps_dist", metadata.version("dps_dist")]


def test_help_comes_without_the_heavy_libraries():
    """`dps --help` must not wait for torch."""
    script = (
        "import sys, dps_dist.cli; print([m for m in ('torch', 'ray', 'ffcv') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_wheel_holds_the_recipes(tmp_path):
    root, clean = Path(__file__).parent.parent, tmp_path / "clean"  # no leftovers of older builds
    shutil.copytree(root / "dps_dist", clean / "dps_dist")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(root / name, clean)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, clean],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"dps_dist/recipes/{name}.yaml" for name in recipes.names()} <= set(names)
    assert {f"dps_dist/recipes/parts/{name}.yaml" for name in recipes.parts()} <= set(names)
    assert "dps_dist/recipes/tables/paper.yaml" in names
    assert "dps_dist/py.typed" in names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_plan(dps):
    code, out, _ = dps(
        *("plan", "imagenet-resnet152", "--nodes", 8, "--gpus-per-node", 8),
        *("--bandwidth", 100, "--images-per-s", 500),
    )
    assert code == 0 and "2.56 GB" in out and "1,281,167" in out and "200 epochs" in out
    code, out, _ = dps(
        *("plan", "imagenet-resnet152", "--nodes", 8, "--gpus-per-node", 8, "--bandwidth", 100)
    )
    assert code == 0 and "give --images-per-s" in out
    code, out, _ = dps(
        *("plan", "imagenet-resnet152", "--nodes", 1, "--gpus-per-node", 8, "--images-per-s", 900)
    )
    assert code == 0 and "give --images-per-s" not in out
    Path("my.yaml").write_text("extends: imagenet-resnet152\ndata: {path: birds}\n")
    code, out, _ = dps(
        *("plan", "my.yaml", "--nodes", 2, "--gpus-per-node", 4),
        *("--samples", 3_000_000, "--classes", 5000),
    )
    assert code == 0 and "3,000,000" in out and "5,000" in out
    code, out, _ = dps("plan", "cifar10-resnet18", "--gpus-per-node", 4)
    assert code == 0 and "give --images-per-s" in out
    refused = ("plan", "imagenet-resnet152")
    assert_sentence(dps(*refused, "--nodes", 0), "--nodes is 0", "1 or more")
    assert_sentence(dps(*refused, "--bandwidth", -1), "--bandwidth is -1", "above 0")
    assert_sentence(dps(*refused, "--images-per-s", "nan"), "--images-per-s is nan", "above 0")
    assert_sentence(dps(*refused, "--nodes", 999), "7992 workers", "data.batch_size is only 1024")
    assert_sentence(dps(*refused, "--set", "data.path=birds"), "birds", "--samples")
    assert_sentence(dps(*refused, "--classes", 1), "--classes is 1", "2 or more")
