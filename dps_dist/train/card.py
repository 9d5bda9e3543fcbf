"""The card of an exported model: what it is, how it was made and measured, how to load it."""

import json
from typing import Any

from dps_dist import models
from dps_dist.config import Config
from dps_dist.data import manifest as manifests
from dps_dist.data.loader import shows_whole
from dps_dist.errors import InputError
from dps_dist.train.evaluation import JSON, JSON_OF_BEST, PRECISION, every_figure, numbers
from dps_dist.train.files import SUMMARY
from dps_dist.train.state import MEASURED
from dps_dist.train.storage import Storage
from dps_dist.train.trained import Trained, names_sum


def card(trained: Trained, storage: Storage) -> str:
    """README.md of an export: what the model is, how good, and how it is loaded."""
    config, classes = trained.config, trained.data["classes"]
    data, (figures, where) = config.data, _figures(storage, trained)
    epochs, done = config.train.epochs, trained.moment.epoch
    noise = f" with {data.noise.rate:.0%} {data.noise.kind} label noise"
    parts = [
        f"# {storage.name}",
        f"{config.model.name}, trained with the method {config.method.name} on {data.source}"
        f"{noise if data.noise.kind != 'none' else ''}: {classes} classes, "
        f"{f'{done} of ' if done < epochs else ''}{epochs} epochs, batches of {data.batch_size}. "
        "`config.yaml` is the recipe: `dps train config.yaml` runs it again.",
    ]
    if trained.checkpoint == "best":
        parts.append(
            f"Of the checkpoints that were kept this one had the best accuracy on "
            f"{config.evaluate.split} in training, which flatters its figures there."
        )
    if figures:
        rows = [f"| {name} | {value:.4g} |" for name, value in figures.items()]
        parts += ["## Figures", "\n".join([f"| {where} | |", "|---|---|", *rows])]
    if temperature := figures.get("temperature"):
        parts.append(
            f"For calibrated probabilities divide the logits by the temperature {temperature:.4g}, "
            "which was fitted on samples that were held out of training."
        )
    elif not data.hold_out:
        parts.append(
            "No temperature was fitted, as nothing was held out of training (data.hold_out is 0): "
            "the probabilities are as calibrated as training left them."
        )
    parts += ["## Loading", f"```python\n{loading(config, classes)}```", "## Classes"]
    parts.append(_classes(trained))
    return "\n\n".join(parts) + "\n"


def _figures(storage: Storage, trained: Trained) -> tuple[dict[str, float], str]:
    """What `dps evaluate` found of these weights, or else the run at its end; and on which split,
    in which precision.

    A run that went on has other weights than those that were measured.
    """
    own, split = (trained.moment.epoch, trained.moment.position), trained.config.evaluate.split
    for facts in (_json(storage, name) for name in (JSON, JSON_OF_BEST)):
        if "figures" in facts and (facts.get("epoch"), facts.get("position")) == own:
            where = f"{facts.get('split', split)}, in {facts.get('precision', PRECISION)}"
            return every_figure(facts), where
    summary = _json(storage, SUMMARY)
    at_end, amp = (summary.get("epochs"), 0) == own, trained.config.train.amp
    figures = numbers({key: summary.get(key) for key in MEASURED}) if at_end else {}
    return figures, f"{split}, in {PRECISION if amp == 'none' else amp}"


def _json(storage: Storage, name: str) -> dict[str, Any]:
    """An object of the run's folder; {} if it is not there."""
    try:
        content = json.loads(storage.read(name))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def loading(config: Config, classes: int, file: str = "model.safetensors") -> str:
    """Python that loads the model and prepares an image: plain torchvision where it has the model.

    3x3 stems, which torchvision lacks, take two lines.
    """
    name, data = config.model.name, config.data
    row, side = models.MODELS[name], data.eval_resolution or data.resolution
    own, made = "dps_dist.models", f'dps_dist.models.build("{name}", {classes})'
    if row.torchvision or row.published is not None:
        call = row.torchvision or f"{name}(num_classes={{classes}})"
        call = call.format(classes=classes, side=data.resolution)
        own, made = "torchvision", f"torchvision.models.{call}"
    stem = []
    if own == "torchvision" and config.model.stem == "3x3":
        first, pool = row.stem_layers
        stem = [
            f"model.{first} = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)",
            f"model.{pool} = torch.nn.Identity()",
        ]
    larger = f"v2.Resize({round(side / data.eval_crop)}), v2.CenterCrop({side})"
    lines = [
        f"import torch, {own}",
        "from safetensors.torch import load_file",
        "from torchvision.transforms import v2",
        "",
        f"model = {made}",
        *stem,
        f'model.load_state_dict(load_file("{file}"))',
        "model.eval()",
        f"size = [{f'v2.Resize(({side}, {side}))' if shows_whole(config) else larger}]",
        "pixels = [v2.ToImage(), *size, v2.ToDtype(torch.float32, scale=True)]",
        f"prepare = v2.Compose([*pixels, v2.Normalize({list(data.mean)}, {list(data.std)})])",
        "# probabilities = model(prepare(image)[None]).softmax(-1), image an RGB PIL image",
    ]
    return "\n".join(lines) + "\n"


def _classes(trained: Trained) -> str:
    """The classes by number; only how many where the data are not there to tell their names."""
    try:
        data = manifests.read(trained.config.data.path, "train")
    except InputError:
        data = None
    if data is None or names_sum(data) != trained.data.get("sum of class names"):
        return f"{trained.data['classes']}; their names were not at hand when this was exported."
    return "\n".join(f"{number}. {name}" for number, name in enumerate(data.class_names))
