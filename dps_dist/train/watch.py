"""What an epoch's steps add up to, looked at now and then: a look costs a small exchange.

The step leaves its losses on the device; `look` brings them to the host, finds losses that are not
finite, and lets rank 0 decide for all whether a checkpoint is due and when to look again.
"""

import time
from dataclasses import dataclass
from math import isfinite, nan

import torch
from torch import Tensor, nn

from dps_dist.data.loader import Batch
from dps_dist.errors import InputError
from dps_dist.train.peers import Peers

LOOK_S = 0.5  # about as often progress is shown
NAMED = 8  # samples that are named when their loss is not finite


class NonFiniteLossError(InputError):
    """Training cannot go on; the last checkpoint is from before it happened."""


@dataclass(frozen=True)
class Look:
    loss: float  # of this rank's steps since the last look
    save_is_due: bool


class Watch:
    """Sums over the samples of an epoch, float64: loss, right predictions, samples."""

    def __init__(self, peers: Peers, checkpoint_minutes: float) -> None:
        self.peers, self.checkpoint_minutes = peers, checkpoint_minutes
        self.sums = torch.zeros(3, dtype=torch.float64, device=peers.device)
        self._recent: list[tuple[int, Tensor, Tensor]] = []  # parts of steps
        self._steps = 0  # since the last look
        self._until_look = self._between = 1
        self._looked = self._saved = time.monotonic()

    def add(self, step: int, batch: Batch, loss: Tensor, logits: Tensor) -> None:
        """Samples of a step with their loss [B] and logits [B, K]."""
        right = (logits.argmax(-1) == batch.labels) * batch.weight
        added = (loss * batch.weight).sum(), right.sum(), batch.weight.sum()
        self.sums += torch.stack(added)
        self._recent.append((step, batch.index, loss))

    def step_done(self, now: bool = False) -> Look | None:
        """Counts a step; a Look when it is time for one, or now, on all ranks alike."""
        self._steps += 1
        self._until_look -= 1
        return self.look() if now or self._until_look <= 0 else None

    def look(self) -> Look:
        """Raises NonFiniteLossError on every rank if any rank's loss was not finite."""
        mean = nan
        if self._recent:
            _, index, loss = zip(*self._recent, strict=True)
            mean = float(torch.cat(loss)[torch.cat(index) >= 0].mean())
        # A mean is not finite if one of its losses is not
        first = [-1.0] * (1 + NAMED) if isfinite(mean) else self._first_not_finite()
        now, between = time.monotonic(), self._between
        if self._steps:
            speed = self._steps / max(now - self._looked, 1e-6)
            between = min(max(round(speed * LOOK_S), 1), 2 * between, 200)
        due = 0 < self.checkpoint_minutes * 60 <= now - self._saved
        everyone = self.peers.gather([between, due, *first])
        failed = everyone[everyone[:, 2] >= 0]
        if len(failed):
            step = int(failed[:, 2].min())
            samples = [int(i) for row in failed if row[2] == step for i in row[3:] if i >= 0]
            raise NonFiniteLossError(
                f"the loss is not finite at step {step}, samples {', '.join(map(str, samples))}: "
                "lower optim.lr, set optim.clip_norm, or look at these samples; "
                "checkpoints from before it are kept"
            )
        self._recent.clear()
        self._looked, self._steps = now, 0
        self._until_look = self._between = int(everyone[0, 0])
        return Look(mean, bool(everyone[0, 1]))

    def _first_not_finite(self) -> list[float]:
        """The first step with a loss that is not finite, and its samples; −1 for none."""
        for step, index, loss in self._recent:
            if len(wrong := index[~loss.isfinite() & (index >= 0)]):
                named = wrong[:NAMED].tolist()
                return [step, *named, *[-1] * (NAMED - len(named))]
        return [-1.0] * (1 + NAMED)

    def check_weights(self, model: nn.Module) -> None:
        """Refuse to save what has blown up since the last loss; the ranks' weights are equal."""
        finite = torch.stack([weights.isfinite().all() for weights in model.parameters()])
        if not finite.all():
            raise NonFiniteLossError(
                "the weights are not finite after the last step: lower optim.lr or set "
                "optim.clip_norm; checkpoints from before it are kept"
            )

    def saved(self) -> None:
        """A checkpoint was made: its minutes count anew."""
        self._saved = time.monotonic()

    def end_epoch(self) -> dict[str, float]:
        """The figures of all ranks' samples since the epoch began; the next begins."""
        loss, right, count = self.peers.sum(self.sums).tolist()
        self.sums.zero_()
        return {"train_loss": loss / count, "train_accuracy": right / count}

    def state(self) -> Tensor:
        """Every rank's sums [world_size, 3]; a call of all ranks."""
        return torch.from_numpy(self.peers.gather(self.sums))

    def restore(self, state: Tensor) -> None:
        """The same ranks go on with their sums; of others, the first takes all."""
        if len(state) == self.peers.world_size:
            self.sums.copy_(state[self.peers.rank])
        elif self.peers.rank == 0:
            self.sums.copy_(state.sum(0))
