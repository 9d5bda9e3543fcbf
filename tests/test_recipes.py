"""Configuration and recipes: what resolves, and the sentence for what does not."""

import pytest
import yaml

from dps_dist import recipes
from dps_dist.config import DPS, Baseline, Config
from dps_dist.errors import InputError
from dps_dist.models import build


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_resolves_and_says_what_it_is(name):
    config = recipes.load(name)
    assert recipes.description(name)
    assert yaml.safe_load(recipes.as_yaml(config)) == config.model_dump(mode="json")


@pytest.mark.parametrize("name", recipes.names())
def test_a_resolved_recipe_is_a_recipe(name, tmp_path):
    file = tmp_path / "again.yaml"
    file.write_text(recipes.as_yaml(recipes.load(name)))
    assert recipes.load(str(file)) == recipes.load(name)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_builds_its_model(name):
    import torch

    model = recipes.load(name).model
    with torch.device("meta"):
        build(model.name, 10, stem=model.stem)


def test_every_field_is_described():
    def undescribed(section, path=""):
        for name, field in section.model_fields.items():
            yield from [] if field.description else [path + name]
            for inner in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                if hasattr(inner, "model_fields"):
                    yield from undescribed(inner, f"{path}{name}.")

    assert list(undescribed(Config)) == []


def test_extends_merges_sections_and_replaces_the_rest(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "data: {batch_size: 7, mean: [.1, .2, .3]}\ntrain: {epochs: 3}"
    )
    (tmp_path / "top.yaml").write_text(
        "extends: base.yaml\ndescription: x\ndata: {mean: [.4, .5, .6]}"
    )
    config = recipes.load(str(tmp_path / "top.yaml"))
    assert config.data.batch_size == 7
    assert config.data.mean == (0.4, 0.5, 0.6)
    assert config.train.epochs == 3


def test_a_file_may_extend_a_named_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: cifar10-resnet18\ntrain: {epochs: 2}")
    mine = recipes.load(str(tmp_path / "mine.yaml"))
    assert mine.train.epochs == 2
    assert mine.model == recipes.load("cifar10-resnet18").model


def test_set_overrides_any_field():
    config = recipes.load(
        "digits",
        ["data.batch_size=32", "data.noise.rate=1e-1", "data.noise.kind=symmetric", "train.seed=5"],
    )
    assert (config.data.batch_size, config.data.noise.rate, config.train.seed) == (32, 0.1, 5)
    assert config.data.noise.kind == "symmetric"
    assert recipes.load("digits", ["augment.scale=[.2, .9]"]).augment.scale == (0.2, 0.9)
    assert recipes.load("digits", ["data.noise.mapping={3: 5}"]).data.noise.mapping == {3: 5}
    assert recipes.load(
        "digits", ["data.progressive={end_epoch: 9, resolution: 4}"]
    ).data.progressive


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.batchsize=3", "data.batchsize is not a field .* did you mean batch_size"),
        ("zzz.lr=3", "zzz is not a field .* known here are data, augment"),
        ("method.gama=.9", "method.gama is not a field .* did you mean gamma"),
        ("method.gamma=2", r"method.gamma is 2: .* less than or equal to 1 \(discount γ"),
        ("method.name=foo", 'method.name is "foo": give one of baseline, dps'),
        ("method=3", "method is 3: should be an object"),
        ("launch.workers=0", "launch.workers is 0: give a number such as 2, or 1:4"),
        ("launch.workers=3:2", "launch.workers is '3:2': give a number such as 2, or 1:4"),
        ("data.batch_size=0", "data.batch_size is 0: should be greater than or equal to 1"),
        ("data.batch_size=abc", 'data.batch_size is "abc": should be a valid integer .images a'),
        ("data.batch_size=true", "data.batch_size is true: should be a valid integer"),
        ("data.batch_size=1.5", "data.batch_size is 1.5"),
        ("data.noise.rate=1.01", "data.noise.rate is 1.01: should be less than or equal to 1"),
        ("data.noise.rate=.nan", "data.noise.rate is NaN: should be a finite number"),
        ("data.noise.kind=sym", "data.noise.kind is \"sym\": should be 'none', 'symmetric'"),
        ("data.noise.rat=1", "data.noise.rat is not a field .* did you mean rate"),
        ("data.mean=[1, 2]", r"data.mean.2 is \[1, 2\]: Field required"),
        ("data.std=[0, 1, 1]", r"data.std is \[0.0, 1.0, 1.0\]: every entry must be above 1e-6"),
        ("augment.scale=[1, .5]", r"augment.scale is \[1.0, 0.5\]: it must ascend"),
        (
            "data.progressive={resolution: 4, start_epoch: 5, end_epoch: 5}",
            "data.progressive.end_epoch is 5: give more than start_epoch",
        ),
        (
            "data.progressive={resolution: 9, end_epoch: 5}",
            "data.progressive.resolution is 9: give at most data.resolution, 8",
        ),
        ("data.mean=&a [*a]", "it holds what no field can be"),
        ("data={2020-01-01: 3}", "it holds what no field can be"),
        ("data.path=!!set {a}", "it holds what no field can be"),
        ("data.path=!!binary aGVq", "it holds what no field can be"),
        ("data.path=" + "[" * 3000, "not valid YAML"),
        ("data.path=\0", "not valid YAML"),
        ("train.seed=" + "9" * 30, "train.seed is 9+"),
        ("data.resolution=200000", "data.resolution is 200000: should be less than"),
        ("data=3", "data is 3: should be an object"),
        ("data.batch_size", "write it as section.field=value"),
        (".=3", "write it as section.field=value"),
        ("data.mean=[}", "not valid YAML at line 1"),
        ("data.source=2024-01-01", None),
    ],
)
def test_a_wrong_setting_gets_its_sentence(setting, said):
    if said is None:  # a date is text where text is asked for
        assert recipes.load("digits", [setting]).data.source == "2024-01-01"
        return
    with pytest.raises(InputError, match=said) as caught:
        recipes.load("digits", [setting])
    assert "\n" not in str(caught.value)


def test_another_method_leaves_nothing_of_the_old_one():
    assert recipes.load("digits", ["method.c=5", "method.gamma=.5"]).method == DPS(c=5, gamma=0.5)
    other = recipes.load("digits", ["method.c=5", "method.name=baseline"])
    assert other.method == Baseline()
    assert recipes.load("digits", ["method.c=5", "method.name=dps"]).method.c == 5


def test_numbers_with_a_colon_are_no_sexagesimals():
    assert recipes.load("digits", ["launch.workers=1:2"]).launch.worker_range == (1, 2)
    assert recipes.load("digits", ["launch.workers=3"]).launch.worker_range == (3, 3)
    assert recipes.load("digits", ["train.seed=0x10"]).train.seed == 16


def test_two_wrong_fields_are_both_named():
    with pytest.raises(InputError, match=r"data.batch_size is 0.*; train.epochs is 0"):
        recipes.load("digits", ["data.batch_size=0", "train.epochs=0"])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.yaml": "extends: a.yaml"}, "a.yaml extends itself"),
        ({"a.yaml": "extends: b.yaml", "b.yaml": "extends: a.yaml"}, "extends itself .*b.yaml →"),
        ({"a.yaml": "extends: ../{here}/a.yaml"}, "extends itself"),
        ({"a.yaml": "extends: nothere"}, "recipe nothere does not exist"),
        ({"a.yaml": "extends: digit"}, "did you mean digits"),
        ({"a.yaml": "extends: [digits]"}, r"extends is \['digits'\]: give the name of one"),
        ({"a.yaml": "- 1"}, "a recipe is a mapping"),
        ({"a.yaml": "data: [:"}, "not valid YAML"),
        ({"a.yaml": "data: !!python/object/apply:os.getcwd []"}, "not valid YAML"),
        ({}, "a.yaml does not exist"),
    ],
)
def test_a_wrong_recipe_gets_its_sentence(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("{here}", tmp_path.name))
    with pytest.raises(InputError, match=said):
        recipes.load(str(tmp_path / "a.yaml"))


def test_a_recipe_that_is_no_text_gets_its_sentence(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"data: \xff\xfe")
    with pytest.raises(InputError, match="not a text file"):
        recipes.load(str(tmp_path / "a.yaml"))


def test_a_config_cannot_be_changed_by_mistake():
    with pytest.raises(ValueError, match="frozen"):
        recipes.load("digits").data.batch_size = 3
