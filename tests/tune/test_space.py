"""What a sweep tries: points, their names, and what is refused before anything starts."""

import fcntl
import json
import math
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import typer
from hypothesis import example, given
from hypothesis import strategies as st
from ray import tune
from ray.exceptions import RayError
from ray.tune import TuneError

from dps_dist import recipes
from dps_dist.cli.sweeps import start
from dps_dist.config import Launch
from dps_dist.config.sweep import BETTER, SEED
from dps_dist.errors import FailedError, InputError
from dps_dist.launch import ray_tune
from dps_dist.launch import space as spaces
from dps_dist.launch import trial as trials
from dps_dist.launch.runs import NAME, Run
from dps_dist.launch.sweeps import Sweep, Trial, checked, create, open_folder
from dps_dist.launch.trial import trial
from dps_dist.train.files import SUMMARY
from dps_dist.train.storage import Storage

values = st.one_of(
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=3),
)
points = st.fixed_dictionaries({"method.gamma": values, "optim.name": values, SEED: values})


@given(points, points)
@example({"a.b": 1}, {"a.b": "1"})
@example({"a.b": True}, {"a.b": "True"})
@example({"a.b": "x-c1", "a.c": 2}, {"a.b": "x", "a.c": 12})
@example({"a.b": 0.1}, {"a.b": 0.1 + 1e-12})
@example({"a.b": 1, "c.b": 2}, {"a.b": 1, "c.b": 3})
def test_points_that_differ_have_folders_that_differ(one, other):
    names = spaces.name(one), spaces.name(other)
    assert all(NAME.fullmatch(name) for name in names) and max(map(len, names)) <= 100
    same = {key: (one[key], str(one[key])) for key in one} == {
        key: (other[key], str(other[key])) for key in other
    }
    assert not same or names[0] == names[1]
    assert names[0] != names[1] or one == other  # 1 and 1.0 are one


def test_a_point_is_named_for_people():
    point = {"method.gamma": 0.95, "method.c": 1000.0, SEED: 2}
    assert spaces.name(point) == "gamma0.95-c1000-seed2"


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
)
def test_a_grid_has_every_combination_once(one, other):
    found = spaces.grid({"a.b": one, "c.d": other})
    assert len(found) == len(one) * len(other)
    assert {(point["a.b"], point["c.d"]) for point in found} == {(a, b) for a in one for b in other}


def test_a_value_that_is_named_twice_is_tried_once():
    assert len(spaces.grid({"method.c": [5, 5, 7]})) == 2


@given(st.integers(0, 2**31), st.floats(1e-6, 1), st.floats(1.5, 1e3))
def test_what_is_drawn_lies_in_its_range(seed, low, high):
    space = {
        "a.u": {"uniform": [low, high]},
        "a.l": {"loguniform": [low, high]},
        "a.r": {"randint": [-2, 3]},
        "a.c": ["x", "y"],
    }
    drawn = spaces.draw(space, 20, seed)
    assert drawn == spaces.draw(space, 20, seed)
    for point in drawn:
        assert low * (1 - 1e-5) <= point["a.u"] <= high * (1 + 1e-5)
        assert low * (1 - 1e-5) <= point["a.l"] <= high * (1 + 1e-5)
        assert point["a.r"] in range(-2, 4) and point["a.c"] in ("x", "y")


@given(st.integers(0, 2**31), st.integers(1, 30))
def test_no_point_is_drawn_twice(seed, count):
    space = {"a.b": ["x", "y", "x"], "c.d": {"randint": [0, 2]}}
    if count <= 6:
        assert len({spaces.name(point) for point in spaces.draw(space, count, seed)}) == count
        return
    sentence = f"--trials is {count}: the space has only 6 point.s.; give at most 6"
    with pytest.raises(InputError, match=sentence):
        spaces.draw(space, count, seed)


def test_optuna_chooses_no_point_twice():
    from dps_dist.launch.distinct import DistinctOptuna

    asked = Sweep("digits", {"a.b": [1, 2, 3, 4], "c.d": ["x", "y", "z"]}, (), trials=12)
    known = [{"a.b": 3, "c.d": "y"}, {"a.b": 1, "c.d": "z"}]
    search = DistinctOptuna(
        spaces.draw(asked.space, asked.trials), points_to_evaluate=known, seed=2
    )
    search.set_search_properties("accuracy", "max", ray_tune._domains(asked))
    found = []
    for k in range(asked.trials):
        found.append(search.suggest(f"t{k}"))
        if k % 3:  # others are still running
            search.on_trial_result(f"t{k}", {"accuracy": found[-1]["a.b"], "training_iteration": 1})
            search.on_trial_complete(f"t{k}", {"accuracy": found[-1]["a.b"]})
    assert found[:2] == known
    assert len({spaces.name(point) for point in found}) == 12


def test_loguniform_is_even_over_the_logarithm():
    drawn = spaces.draw({"a.l": {"loguniform": [1e-4, 1.0]}}, 4000)
    logs = sorted(math.log10(point["a.l"]) for point in drawn)
    assert abs(logs[1000] + 3) < 0.15 and abs(logs[3000] + 1) < 0.15


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "nothing to try"),
        ("method.gamma: []", "method.gamma has no values; give at least one"),
        ("method.gamma: .9", "method.gamma is 0.9: write a list of values or"),
        ("optim.lr: {loguniform: [0, 1]}", "optim.lr is {'loguniform': [0, 1]}: write"),
        ("optim.lr: {uniform: [2, 1]}", "optim.lr is {'uniform': [2, 1]}: write"),
        ("optim.lr: {normal: [0, 1]}", "optim.lr is {'normal': [0, 1]}: write"),
        ("method.c: {randint: [1, 2.5]}", "method.c is {'randint': [1, 2.5]}: write"),
    ],
)
def test_a_space_that_says_nothing_is_refused(tmp_path, text, sentence):
    file = tmp_path / "space.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        spaces.read(file)
    assert str(refused.value).startswith(f"{file}: {sentence}")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"space": {"method.gamma": [0.9, 1.2]}}, "method.gamma is 1.2: should be less than or"),
        ({"space": {"method.c": [50, 0]}}, "method.c is 0: should be greater than 0"),
        ({"space": {"method.gama": [0.9]}}, "method.gama is not a field of the configuration: did"),
        ({"space": {"method.gamma": {"uniform": [0.5, 1.5]}}}, "method.gamma is a range: give a"),
        (
            {
                "space": {"method.gamma": {"uniform": [0.5, 1.5]}},
                "search": "random",
                "trials": 2,
            },
            "method.gamma is 1.5: should be",
        ),
        (
            {"space": {"train.epochs": {"uniform": [1, 3]}}, "search": "random", "trials": 2},
            "train.epochs is {'uniform': [1, 3]}: it is a whole number; give a list of them, or "
            "{randint: [1, 3]}",
        ),
        (
            {"space": {"train.epochs": {"uniform": [1, 3]}}, "search": "optuna", "trials": 2},
            "train.epochs is {'uniform': [1, 3]}: it is a whole number",
        ),
        (  # what is none in the recipe tells no type
            {
                "space": {"data.eval_resolution": {"uniform": [8, 9]}},
                "search": "random",
                "trials": 2,
            },
            "data.eval_resolution is 8.",
        ),
        ({"search": "random"}, "--trials is 0: --search random needs at least 1"),
        ({"search": "random", "trials": 2}, "--trials is 2: the space has only 1 point(s)"),
        ({"search": "optuna", "trials": 2}, "--trials is 2: the space has only 1 point(s)"),
        ({"seeds": 0}, "--seeds is 0: give at least 1"),
        ({"seeds": 2, "space": {SEED: [0, 1]}}, "--seeds is 2 and train.seed is in the space"),
        ({"space": {"launch.workers": [1, 2]}}, "launch.workers is the same for all trials"),
        ({"space": {"data.hold_out": [9]}}, "data.hold_out is the same for all trials"),
        ({"settings": ("launch.workers=4",)}, "--set launch.workers: give --workers-per-trial"),
        ({"hold_out": 10**6}, None),
    ],
)
def test_a_sweep_of_which_a_trial_would_be_refused_is_refused(digits, change, sentence):
    asked = Sweep(
        **{
            "recipe": "digits-sym40",
            "space": {"method.gamma": [0.9]},
            "settings": (f"data.path={digits}",),
            **change,
        }
    )
    if sentence is None:  # seen with the data, before Ray is started
        from dps_dist.launch import ray_train

        config = checked(asked).config({"method.gamma": 0.9})
        with pytest.raises(InputError, match=r"data\.hold_out is 1000000"):
            ray_train.check(config)
        return
    with pytest.raises(InputError) as refused:
        checked(asked)
    assert sentence in str(refused.value)


def test_a_tenth_of_the_training_set_is_held_out(digits):
    asked = Sweep("digits-sym40", {"method.gamma": [0.9]}, (f"data.path={digits}",), seeds=2)
    sweep = checked(asked)
    assert sweep.hold_out == 120
    config = sweep.config(sweep.points()[1])
    assert config.evaluate.split == "hold_out" and config.train.seed == 1


@pytest.mark.parametrize("asked", [0, -1, 3])
def test_more_or_fewer_trials_at_once_than_can_be_are_refused(asked):
    nodes = [{"CPU": 2.0}, {"CPU": 3.0}]
    assert ray_tune.concurrency(Launch(workers=2), nodes, None) == 2
    with pytest.raises(InputError, match=f"--concurrent is {asked}: .* give 1 to 2"):
        ray_tune.concurrency(Launch(workers=2), nodes, asked)


@pytest.mark.parametrize(
    ("cpus", "workers", "placement", "most"),
    [
        ((2, 3), 2, "PACK", 2),
        ((3, 3), 2, "SPREAD", 3),  # one has a worker on each
        ((3, 3), 2, "STRICT_PACK", 2),
        ((3, 5), 2, "STRICT_PACK", 3),
        ((4, 4), 2, "STRICT_SPREAD", 4),
        ((8, 1), 2, "STRICT_SPREAD", 1),
        ((3, 2, 1), 2, "STRICT_SPREAD", 3),
        ((1, 1), "1:9", "STRICT_SPREAD", 1),
        ((1, 1), "1:9", "STRICT_PACK", 1),
    ],
)
def test_as_many_trials_run_at_once_as_their_placement_allows(cpus, workers, placement, most):
    nodes = [{"CPU": float(count)} for count in cpus]
    launch = Launch(workers=workers, placement=placement)
    assert ray_tune.concurrency(launch, nodes, None) == most


def test_more_workers_than_a_trial_can_have_are_refused_by_the_options_name(digits, tmp_path):
    with pytest.raises(InputError, match=r"--workers-per-trial is 3: .* can place 2 workers"):
        ray_tune.concurrency(Launch(workers=3), [{"CPU": 2.0}], None)
    for workers, sentence in (("3", "is not a multiple"), ("65:70", "data.batch_size is only 64")):
        asked = Sweep("digits", {"method.c": [9]}, (f"data.path={digits}",), workers=workers)
        folder = open_folder(checked(asked), str(tmp_path), "one", resume=False)
        with pytest.raises(InputError, match=f"^--workers-per-trial is {workers}: .*{sentence}"):
            ray_tune.sweep(folder, None, lambda folder: None)
        assert not (tmp_path / "one").exists()


def test_a_stopped_sweep_says_how_it_goes_on(digits, tmp_path, monkeypatch, capsys):
    def stopped(folder, *_):
        create(folder)
        (point,) = folder.sweep.points()
        folder.note(spaces.name(point), Trial(point, "waiting"))

    monkeypatch.setattr(ray_tune, "sweep", stopped)
    (tmp_path / "my recipe.yaml").write_text("extends: digits")
    recipe, settings = str(tmp_path / "my recipe.yaml"), (f"data.path={digits}",)
    with pytest.raises(typer.Exit):
        start(Sweep(recipe, {"method.c": [9]}, settings), str(tmp_path / "out"), None, False, None)
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.startswith("my_recipe-2")
    told = capsys.readouterr().err
    assert f"the same command with --name {folder.name} --resume goes on" in told


def test_a_search_that_was_stopped_before_its_next_point_says_so(
    digits, tmp_path, monkeypatch, capfd
):
    """What Optuna has not chosen yet is neither waiting nor running."""

    def one_of_two(folder, concurrent, changed):
        create(folder)
        folder.note("first", Trial({"method.c": 9.0}, "finished"))

    monkeypatch.setattr(ray_tune, "sweep", one_of_two)
    space = {"method.c": {"uniform": [5, 50]}}
    asked = Sweep("digits", space, (f"data.path={digits}",), search="optuna", trials=2)
    with pytest.raises(typer.Exit) as ended:
        start(asked, str(tmp_path), "a", False, None)
    assert ended.value.exit_code == 130 and "--name a --resume" in capfd.readouterr().err


def test_what_finished_unnoticed_is_noted_though_nothing_is_left_to_run(digits, tmp_path):
    """The driver died between a trial's summary and its own note."""
    asked = checked(Sweep("digits", {"method.c": [9]}, (f"data.path={digits}",)))
    folder = open_folder(asked, str(tmp_path), "one", resume=False)
    create(folder)
    (point,) = asked.points()
    folder.note(spaces.name(point), Trial(point, "running"))
    folder.run(spaces.name(point)).write(SUMMARY, b"{}")
    again = open_folder(asked, str(tmp_path), "one", resume=True)
    assert ray_tune._to_run(again) == []
    kept = json.loads((tmp_path / "one" / "trials.json").read_text())
    assert [trial["status"] for trial in kept.values()] == ["finished"]


def test_a_trial_that_another_process_has_finished_meanwhile_is_not_trained(digits, tmp_path):
    run = Run(recipes.load("digits", [f"data.path={digits}"]), Storage(tmp_path / "run"), True)
    run.create()
    with (tmp_path / "run" / "config.yaml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=trial, args=(run, set(), None, 0.0))
        thread.start()
        thread.join(1.5)
        assert thread.is_alive()  # it waits for the other
        run.storage.write(SUMMARY, b"{}")
    thread.join(30)
    assert not thread.is_alive()
    assert sorted(run.storage.names()) == ["config.yaml", SUMMARY]


def test_tune_hears_of_an_epoch_every_so_often_and_always_of_the_last(monkeypatch):
    clock, told = [100.0], []
    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(tune, "report", told.append)
    of_all, now_and_then = trials._Told(6, every_s=0.0), trials._Told(6, every_s=2.0)
    rows = [{"kind": "epoch", "epoch": n, "accuracy": n / 10, "ece": 0.5} for n in range(1, 7)]
    rows = [{**row, "nll": None if row["epoch"] == 3 else 1.0} for row in rows]
    heard = {}
    for name, teller in (("all", of_all), ("some", now_and_then)):
        for row in rows:
            teller.hear(row)
            teller.hear({"kind": "epoch", "epoch": row["epoch"]})  # that was not measured
            teller.hear({"kind": "progress", "epoch": row["epoch"], "accuracy": 1.0})
            clock[0] += 0.9
        heard[name], told[:] = [*told], []
    # The last one without its number: a scheduler is not to stop who has but to write a summary
    assert [row.get("epoch") for row in heard["all"]] == [1, 2, 3, 4, 5, None]
    assert [row.get("epoch") for row in heard["some"]] == [1, 4, None]
    assert all(row.keys() - {"epoch"} == set(BETTER) for row in heard["all"])
    assert [math.isnan(row["nll"]) for row in heard["all"]] == [False] * 2 + [True] + [False] * 3


def test_a_trial_on_a_full_disk_is_refused_in_a_sentence(digits, small_disk, monkeypatch):
    told = []
    monkeypatch.setattr(tune, "report", told.append)
    run = Run(recipes.load("digits", [f"data.path={digits}"]), Storage(small_disk / "run"), True)
    with suppress(OSError):
        (small_disk / "others").write_bytes(bytes(3 << 20))
    trial(run, set(), None, 0.0)
    (said,) = told
    assert "config.yaml: No space left on device; make room or choose another --out" in said.pop(
        "refused"
    )
    assert all(map(math.isnan, said.values())) and said.keys() == set(BETTER)


@pytest.mark.parametrize(
    "error",
    [
        TuneError("Traceback (most recent call last):\n  …\nOSError: No space left: 'trials.json'"),
        RayError("OSError: No space left: 'trials.json'"),
    ],
)
def test_what_ends_tune_is_said_in_a_sentence(digits, tmp_path, monkeypatch, error):
    def fails(folder, *_):
        folder.note("one", Trial({"method.c": 9}, "running"))
        raise error

    monkeypatch.setattr(ray_tune, "connect", lambda: False)
    monkeypatch.setattr(ray_tune, "nodes", lambda: [{"CPU": 2.0}])
    monkeypatch.setattr(ray_tune, "_fit", fails)
    asked = checked(Sweep("digits", {"method.c": [9]}, (f"data.path={digits}",)))
    sentence = r"^the sweep cannot go on \(OSError: No .*'\): .* --name one --resume does$"
    with pytest.raises(FailedError, match=sentence):
        start(asked, str(tmp_path), "one", False, None)
    (trial,) = json.loads((tmp_path / "one" / "trials.json").read_text()).values()
    assert trial["status"] == "waiting"
    page = (tmp_path / "one" / "index.html").read_text()
    assert "running" not in page and 'http-equiv="refresh"' not in page


@pytest.mark.parametrize("file", ["sweep.yaml", "trials.json"])
@pytest.mark.parametrize("content", [b"\x80\x81", b"{", b"[]", b""])
def test_a_sweep_with_a_damaged_file_is_refused(digits, tmp_path, file, content):
    asked = checked(Sweep("digits", {"method.c": [9]}, (f"data.path={digits}",)))
    create(open_folder(asked, str(tmp_path), "one", resume=False))
    (tmp_path / "one" / file).write_bytes(content)
    with pytest.raises(InputError, match=f"one/{file} is damaged: restore it, or .* --name"):
        open_folder(asked, str(tmp_path), "one", resume=True)


@pytest.mark.parametrize("content", ['{"a": 3}', '{"a": {}}', '{"a": {"point": {}, "when": 1}}'])
def test_a_sweep_whose_trials_are_none_is_refused(digits, tmp_path, content):
    asked = checked(Sweep("digits", {"method.c": [9]}, (f"data.path={digits}",)))
    create(open_folder(asked, str(tmp_path), "one", resume=False))
    (tmp_path / "one/trials.json").write_text(content)
    with pytest.raises(InputError, match=r"one/trials\.json is damaged: restore it"):
        open_folder(asked, str(tmp_path), "one", resume=True)


def test_a_sweep_whose_recipe_has_changed_is_another(digits, tmp_path):
    recipe = tmp_path / "my.yaml"
    recipe.write_text(f"extends: digits\ndata: {{path: {digits}}}\n")
    asked = checked(Sweep(str(recipe), {"method.gamma": [0.9]}))
    create(open_folder(asked, str(tmp_path), "one", resume=False))
    recipe.write_text(f"extends: digits\ndata: {{path: {digits}}}\noptim: {{lr: .5}}\n")
    with pytest.raises(InputError, match="the recipe has changed"):
        open_folder(asked, str(tmp_path), "one", resume=True)


def test_only_the_same_sweep_is_resumed(digits, tmp_path):
    asked = checked(Sweep("digits-sym40", {"method.gamma": [0.9]}, (f"data.path={digits}",)))
    create(open_folder(asked, str(tmp_path), "one", resume=False))
    assert open_folder(asked, str(tmp_path), "one", resume=True).trials == {}
    other = checked(Sweep("digits-sym40", {"method.gamma": [0.8]}, (f"data.path={digits}",)))
    with pytest.raises(InputError, match=r"is another sweep .*space is .*0.8.* and was .*0.9"):
        open_folder(other, str(tmp_path), "one", resume=True)
    with pytest.raises(InputError, match="exists: choose another --name"):
        open_folder(asked, str(tmp_path), "one", resume=False)
    with pytest.raises(InputError, match=r"is not a sweep, it has no sweep.yaml"):
        open_folder(asked, str(tmp_path), "two", resume=True)
