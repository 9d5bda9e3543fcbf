"""The step before, for a method that sees it again (DLB); found again after a restart.

A checkpoint holds what the model said of it. Its images need not be saved: the loader brings the
same ones again.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dps_dist.data.loader import Batch, resolution_at
from dps_dist.methods import Samples, View
from dps_dist.train.manifest import Moment
from dps_dist.train.mixing import mixed, seeded

if TYPE_CHECKING:
    from dps_dist.train.setup import Training


@dataclass
class Recall:
    """The parts of the last step with their logits, and the moment at which it began."""

    at: Moment | None = None
    parts: list[Samples] = field(default_factory=list)

    def part(self, number: int) -> Samples | None:
        return self.parts[number] if number < len(self.parts) else None

    def fits(self, resolution: int) -> bool:
        """Whether its images can be shown beside others of that size."""
        views = [view for part in self.parts for view in part.other_views]
        return all(view.images.shape[-1] == resolution for view in views)


def shown(training: "Training", batch: Batch, at: Moment) -> list[tuple[Batch, Samples]]:
    """The parts of a step that begins there: as they are, and as the method sees them."""
    config, method = training.config, training.method
    random = seeded(config.train.seed, at, training.peers.rank)
    return [
        (part, replace(mixed(part, config, method, random), before=training.recall.part(number)))
        for number, part in enumerate(batch.parts(training.images_at_once))
    ]


def to_recall(samples: Samples, logits: Tensor) -> Samples:
    """What the next step needs of these; the loader may overwrite their images."""
    views = tuple(View(view.images.clone(), view.mix) for view in samples.other_views)
    nothing = samples.images[:0].clone()
    return replace(samples, images=nothing, other_views=views, before=None, logits=logits.detach())


def saved(training: "Training") -> dict[str, Any] | None:
    """For a checkpoint: when the last step began, and the logits of its samples on all ranks."""
    recall, peers = training.recall, training.peers
    if not training.method.recalls or recall.at is None:
        return None
    logits = [part.logits.float() for part in recall.parts if part.logits is not None]
    return {
        "at": [recall.at.epoch, recall.at.position, recall.at.step],
        "world_size": peers.world_size,
        "index": peers.rows(torch.cat([part.index for part in recall.parts])),
        "logits": peers.rows(torch.cat(logits)),
    }


def restored(training: "Training", state: dict[str, Any] | None) -> Recall:
    """The last step again, on any number of ranks: images are read, logits looked up.

    Nothing of it where another number of ranks has dealt or mixed its samples in another way.
    """
    config, peers = training.config, training.peers
    dealt_by_rank = config.augment.mix != "none" or config.data.shuffle == "shard"
    if state is None or (dealt_by_rank and state["world_size"] != peers.world_size):
        return Recall()
    at = Moment(*state["at"])
    resolution = resolution_at(config.data, at.epoch)
    batches = training.loader.epoch(training.order(at), peers.rank, resolution)
    parts = [
        to_recall(samples, _rows_of(samples.index, state["index"], state["logits"]))
        for _, samples in shown(training, next(batches), at)
    ]
    batches.close()
    return Recall(at, parts)


def _rows_of(wanted: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """The row of each wanted sample; zeros for padding."""
    index, order = index.sort()
    place = torch.searchsorted(index, wanted.cpu()).clamp(max=len(index) - 1)
    found = (index[place] == wanted.cpu()) & (wanted.cpu() >= 0)
    return torch.where(found.unsqueeze(-1), rows[order[place]], 0.0).to(wanted.device)
