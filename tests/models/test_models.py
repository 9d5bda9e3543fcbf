"""The table of models against torchvision, against published sizes, and against bad input."""

import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn

from dps_dist.errors import InputError
from dps_dist.models import MODELS, Classifier, Stem, build

IN_TORCHVISION = [name for name, row in MODELS.items() if row.published is not None]
# One of each family, for what costs seconds a model.
FAMILIES = ["small_cnn", "resnet18", "densenet121", "vit_b_16", "preact_resnet18"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # On a busy machine, threads that wait for each other cost more than they save here.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@cache
def on_meta(name: str, num_classes: int = 1000, stem: Stem | None = None) -> Classifier:
    """A model without storage, kept for the tests that only count or look at shapes."""
    with torch.device("meta"):
        return build(name, num_classes, stem=stem)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def with_random_head(model: Classifier) -> Classifier:
    """ViT's head starts at zero, which would make any comparison of logits pass."""
    nn.init.normal_(model.head.weight)
    return model.eval()


# Sizes


@pytest.mark.parametrize("name", IN_TORCHVISION)
def test_size_is_the_one_that_torchvision_publishes(name: str) -> None:
    assert size(on_meta(name)) == MODELS[name].published.DEFAULT.meta["num_params"]


def densenet_size(blocks: tuple[int, ...], num_classes: int, growth: int = 32) -> int:
    """Huang et al. table 1, summed layer by layer: a BatchNorm of n channels has 2n parameters."""
    channels = 64
    total = 3 * channels * 7 * 7 + 2 * channels
    for block, layers in enumerate(blocks):
        for _ in range(layers):
            bottleneck = 2 * channels + channels * 4 * growth
            total += bottleneck + 2 * 4 * growth + 4 * growth * growth * 3 * 3
            channels += growth
        if block < len(blocks) - 1:
            total += 2 * channels + channels * channels // 2
            channels //= 2
    return total + 2 * channels + (channels + 1) * num_classes


def test_size_of_densenet264() -> None:
    # The formula is right for the three whose sizes are published …
    for name, blocks in {
        "densenet121": (6, 12, 24, 16),
        "densenet169": (6, 12, 32, 32),
        "densenet201": (6, 12, 48, 32),
    }.items():
        assert densenet_size(blocks, 1000) == MODELS[name].published.DEFAULT.meta["num_params"]
    # … so it is right for the fourth.
    assert size(on_meta("densenet264")) == densenet_size((6, 12, 64, 48), 1000) == 33_337_704


def preact_size(
    blocks: int, widths: tuple[int, ...], num_classes: int, stem: int | None = None
) -> int:
    """Of a pre-activation ResNet, stage by stage; its stem has the first stage's width or its
    own."""
    total = 27 * (stem or widths[0])
    for before, width in zip((stem or widths[0], *widths), widths, strict=False):
        convolutions = 9 * before * width + (2 * blocks - 1) * 9 * width * width
        projection = before * width if before != width else 0
        norms = 2 * before + (2 * blocks - 1) * 2 * width
        total += convolutions + projection + norms
    return total + 2 * widths[-1] + (widths[-1] + 1) * num_classes


def test_size_of_preact_resnet18() -> None:
    # 11.17 M, what the CIFAR literature states.
    assert size(on_meta("preact_resnet18", 10)) == 11_172_170
    assert preact_size(2, (64, 128, 256, 512), 10) == 11_172_170


def test_size_of_wide_resnet40_1() -> None:
    # 0.6 M in its paper; 0.57 M with 100 classes in the distillation literature.
    assert size(on_meta("wide_resnet40_1", 10)) == preact_size(6, (16, 32, 64), 10) == 563_930
    assert size(on_meta("wide_resnet40_1", 100)) == 569_780


def test_size_of_wide_resnet10_2() -> None:
    assert size(on_meta("wide_resnet10_2", 10)) == preact_size(1, (32, 64, 128), 10, stem=16)


def test_small_cnn_is_small() -> None:
    assert size(on_meta("small_cnn", 10)) < 100_000


# Forward


@pytest.mark.parametrize("name", MODELS)
def test_shapes_at_imagenet_resolution(name: str) -> None:
    model = on_meta(name)
    images = torch.empty(2, 3, 224, 224, device="meta")
    features = model.embed(images)
    assert features.shape == (2, model.head.in_features)
    assert model.head(features).shape == (2, 1000)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_head_of_the_features(name: str) -> None:
    row = MODELS[name]
    model = build(name, 10, stem="3x3" if row.stems else None, image_size=16)
    assert isinstance(model, Classifier)
    with_random_head(model)
    images = torch.randn(2, 3, 16, 16)
    logits = model(images)
    assert logits.shape == (2, 10)
    assert logits.isfinite().all() and logits.std() > 0
    assert torch.equal(model.head(model.embed(images)), logits)


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "densenet121"])
def test_digits_pass_at_8x8(name: str) -> None:
    assert build(name, 10, stem="3x3", image_size=8)(torch.randn(4, 3, 8, 8)).shape == (4, 10)


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_the_3x3_stem_keeps_the_resolution(name: str) -> None:
    shapes: dict[Stem, torch.Size] = {}

    def note(stem: Stem, _: nn.Module, __: object, output: Tensor) -> None:
        shapes[stem] = output.shape

    for stem in MODELS[name].stems:
        model = on_meta(name, stem=stem)
        pool = model.get_submodule("maxpool" if name == "resnet18" else "features.pool0")
        hook = pool.register_forward_hook(partial(note, stem))
        assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 1000)
        hook.remove()
    assert shapes == {"7x7": (2, 64, 8, 8), "3x3": (2, 64, 32, 32)}


@pytest.mark.parametrize("name", FAMILIES)
def test_channels_last_gives_the_same_logits(name: str) -> None:
    model = with_random_head(build(name, 10, image_size=32))
    images = torch.randn(2, 3, 32, 32)
    expected = model(images)
    model = model.to(memory_format=torch.channels_last)
    actual = model(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "vit_b_16"])
def test_compiles_into_one_graph(name: str) -> None:
    model = with_random_head(build(name, 10, image_size=32)).train()
    images = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.enable_grad():
        torch.testing.assert_close(compiled(images), model(images))


def test_every_parameter_gets_a_gradient() -> None:
    for name in ("small_cnn", "preact_resnet18", "wide_resnet40_1"):
        model = build(name, 10)
        with torch.enable_grad():
            model(torch.randn(4, 3, 16, 16)).logsumexp(1).sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters()), name


def test_convolutions_of_our_own_start_he_normal() -> None:
    for name in ("small_cnn", "preact_resnet18", "wide_resnet40_1"):
        for module in build(name, 10).modules():
            if isinstance(module, nn.Conv2d) and module.weight.numel() > 10_000:
                fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
                assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)


# Exchange with torchvision


@pytest.mark.parametrize("name", IN_TORCHVISION)
def test_state_dict_has_torchvisions_keys_and_shapes(name: str) -> None:
    with torch.device("meta"):
        theirs = torchvision.models.get_model(name)
    ours = on_meta(name)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }


@pytest.mark.parametrize(
    ("name", "side"), [("resnet18", 224), ("resnet50", 64), ("densenet121", 224), ("vit_b_16", 64)]
)
def test_our_weights_in_plain_torchvision_give_our_logits(name: str, side: int) -> None:
    at = {"image_size": side} if name == "vit_b_16" else {}
    ours = with_random_head(build(name, 10, image_size=side))
    theirs = torchvision.models.get_model(name, num_classes=10, **at).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(1, 3, side, side)
    assert torch.equal(theirs(images), ours(images))


def test_our_3x3_stem_in_plain_torchvision_takes_two_lines() -> None:
    ours = build("resnet18", 10, stem="3x3").eval()
    theirs = torchvision.models.resnet18(num_classes=10).eval()
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(theirs(images), ours(images))


# Weights from files


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "wide_resnet40_1"])
def test_weights_survive_a_file(name: str, tmp_path: Path) -> None:
    saved = build(name, 10)
    torch.save(saved.state_dict(), tmp_path / "w.pth")
    loaded = build(name, 10, weights=tmp_path / "w.pth")
    for key, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_torchvisions_file_loads_with_a_fresh_head(tmp_path: Path) -> None:
    theirs = torchvision.models.resnet18()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    ours = build("resnet18", 10, weights=str(tmp_path / "resnet18.pth"))
    assert ours.head.out_features == 10
    images = torch.randn(2, 3, 64, 64)
    theirs.fc = nn.Identity()
    assert torch.equal(ours.eval().embed(images), theirs.eval()(images))


def test_old_densenet_checkpoints_load(tmp_path: Path) -> None:
    # As torchvision publishes them: dotted names, and no batch counters.
    saved = build("densenet121", 10).state_dict()
    old = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", key): value
        for key, value in saved.items()
        if not key.endswith("num_batches_tracked")
    }
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, tmp_path / "old.pth")
    loaded = build("densenet121", 10, weights=tmp_path / "old.pth").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in saved.items())


def test_vit_takes_torchvisions_file_at_another_image_size(tmp_path: Path) -> None:
    # One stored number per tensor keeps the file small.
    state = {
        k: torch.tensor(0.5).expand(v.shape) for k, v in on_meta("vit_b_16").state_dict().items()
    }
    # A plane over the 14×14 grid of 224: interpolation with aligned corners keeps it a plane.
    row, column = torch.meshgrid(torch.linspace(0, 1, 14), torch.linspace(0, 1, 14), indexing="ij")
    plane = torch.cat([torch.tensor([7.0]), (row + 2 * column).flatten()])
    state["encoder.pos_embedding"] = plane[None, :, None].repeat(1, 1, 768)
    torch.save(state, tmp_path / "vit.pth")

    loaded = build("vit_b_16", 10, image_size=48, weights=tmp_path / "vit.pth").state_dict()
    token, *patches = loaded["encoder.pos_embedding"][0, :, 0].tolist()
    assert token == 7.0
    assert patches == pytest.approx([0, 1, 2, 0.5, 1.5, 2.5, 1, 2, 3], abs=0.05)
    assert (loaded["conv_proj.weight"] == 0.5).all()
    assert loaded["heads.head.weight"].shape == (10, 768)
    assert not loaded["heads.head.weight"].any()


class Foreign:
    """What a file may not bring along."""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1, 2], "it holds list"),
        ({}, "it holds no tensors"),
        ({"epoch": 3, "state_dict": {}}, "other than tensors under epoch, state_dict"),
        (Foreign(), "cannot be read as tensors"),
        ({"fc.weight": torch.zeros(10, 7)}, r"fc.weight is \[10, 7\] instead of \[10, 128\]"),
        ({"fc.weight": torch.zeros(())}, r"fc.weight is \[\] instead of"),
        ({"fc.bias": torch.zeros(10)}, r"body.0.0.weight is missing, .* and \d+ more"),
    ],
)
def test_a_file_that_does_not_fit(content: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(content, path)
    with pytest.raises(InputError, match=says) as refused:
        build("small_cnn", 10, weights=path)
    assert str(refused.value).startswith(f"model.weights is {path}: ")


@pytest.mark.parametrize("content", [b"", b"no tensors here", b"PK\x03\x04" + bytes(50)])
def test_a_file_that_is_no_checkpoint(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(content)
    with pytest.raises(InputError, match="cannot be read as tensors"):
        build("small_cnn", 10, weights=path)


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(build("small_cnn", 10).state_dict(), path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match="cannot be read as tensors"):
        build("small_cnn", 10, weights=path)


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    state = build("small_cnn", 10).state_dict() | {"extra": torch.zeros(1)}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(InputError, match="extra is unknown"):
        build("small_cnn", 10, weights=tmp_path / "w.pth")


def test_weights_of_the_other_stem(tmp_path: Path) -> None:
    torch.save(build("resnet18", 10).state_dict(), tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"conv1.weight is \[64, 3, 7, 7\].*same stem"):
        build("resnet18", 10, stem="3x3", weights=tmp_path / "w.pth")


def test_a_missing_file_tells_the_names_there_are() -> None:
    with pytest.raises(
        InputError, match=r"^model.weights is none.pth: it is not a file, nor .*IMAGENET1K_V1"
    ):
        build("resnet18", 10, weights="none.pth")
    with pytest.raises(InputError, match=r"IMAGENET1K_V1: it is not a file; give the path"):
        build("small_cnn", 10, weights="IMAGENET1K_V1")


def test_a_failed_download_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", no_network)
    with pytest.raises(
        InputError,
        match=r"^model.weights is IMAGENET1K_V1: .*https://.*no route to host.*give its path",
    ):
        build("resnet18", 10, weights="IMAGENET1K_V1")


def test_published_weights_are_read_from_torchs_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    theirs = torchvision.models.resnet18()
    file = Path(MODELS["resnet18"].published.IMAGENET1K_V1.url).name
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(theirs.state_dict(), tmp_path / "hub" / "checkpoints" / file)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    ours = build("resnet18", 1000, weights="IMAGENET1K_V1")
    assert torch.equal(ours.head.weight, theirs.fc.weight)


# Other bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "resnet81"}, "^model.name is resnet81: give .*small_cnn, .*resnet18 is the clos"),
        ({"name": "DenseNet-264"}, "densenet264 is the closest"),
        ({"name": "?"}, r"^model.name is \?: give one of [^(]*$"),
        ({"num_classes": 1}, "^num_classes is 1: .* at least 2"),
        ({"image_size": 4}, "^data.resolution is 4: give at least 8"),
        (
            {"stem": "5x5"},
            "^model.stem is 5x5: resnet18 has no such stem; give 7x7 or 3x3, or leav",
        ),
        ({"name": "small_cnn", "stem": "7x7"}, "small_cnn has no such stem; give 3x3, or leave it"),
        ({"name": "vit_b_16", "stem": "3x3"}, "vit_b_16 has no such stem; leave it out"),
        ({"name": "vit_b_16", "image_size": 100}, "^data.resolution is 100: .* a multiple of 16"),
        (
            {"name": "densenet121", "image_size": 28},
            "^data.resolution is 28: .* at least 29.* model.stem=3x3",
        ),
    ],
)
def test_bad_input_gets_one_sentence(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says) as refused, torch.device("meta"):
        build(**({"name": "resnet18", "num_classes": 10} | arguments))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
