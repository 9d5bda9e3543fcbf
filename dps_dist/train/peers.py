"""This process among the ranks of a run: who it is, and the small exchanges outside the step."""

import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor


class Peers:
    """The ranks of the default process group, which whoever launched this process has made.

    Gradients use that group. The target store, the checkpoint writer (a thread) and the exchanges
    here have groups of their own: messages of one never wait behind another's.
    """

    def __init__(self, device: torch.device | str = "cpu", timeout_s: float = 300.0) -> None:
        self.device = torch.device(device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._timeout = timedelta(seconds=timeout_s)
        self._control = self.new_group()

    def new_group(self, device: torch.device | None = None) -> dist.ProcessGroup:
        """A further group of all ranks, on NCCL for tensors on GPUs; a call of all ranks."""
        backend = "nccl" if device is not None and device.type == "cuda" else "gloo"
        group = dist.new_group(backend=backend, timeout=self._timeout)
        assert isinstance(group, dist.ProcessGroup)  # all ranks are in it
        return group

    def gather(self, values: Sequence[float] | Tensor) -> NDArray[np.float64]:
        """Every rank's values [world_size, n]."""
        own = torch.as_tensor(values, dtype=torch.float64).cpu()
        everyone = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyone, own, group=self._control)
        gathered: NDArray[np.float64] = torch.stack(everyone).numpy()
        return gathered

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on the CPU, added in the order of ranks."""
        return torch.from_numpy(self.gather(values.reshape(-1))).sum(0).reshape(values.shape)

    def rows(self, own: Tensor, everywhere: bool = True) -> Tensor:
        """All ranks' rows one after the other, on the CPU; each rank may have another number.
        Not everywhere: only rank 0 has them, the others none."""
        counts = self.gather([len(own)]).ravel().astype(int).tolist()
        padded = own.new_zeros((max(counts), *own.shape[1:]), device="cpu")
        padded[: len(own)] = own
        here = everywhere or self.rank == 0
        everyone = [torch.empty_like(padded) for _ in counts] if here else []
        if everywhere:
            dist.all_gather(everyone, padded, group=self._control)
        else:
            dist.gather(padded, everyone or None, dst=0, group=self._control)
        if not here:
            return padded[:0]
        return torch.cat([rows[:count] for rows, count in zip(everyone, counts, strict=True)])

    def hosts(self) -> list[str]:
        """Every rank's host."""
        own = socket.gethostname().encode()[:64].ljust(64, b"\0")
        return [bytes(row.astype("u1")).rstrip(b"\0").decode() for row in self.gather(list(own))]

    def tell(self, text: str | None, source: int = 0) -> str | None:
        """Rank 0's text, or that of another source, on every rank."""
        data = (text or "").encode() if self.rank == source else b""
        size = torch.tensor([len(data) if text is not None else -1])
        dist.broadcast(size, src=source, group=self._control)
        if size.item() < 0:
            return None
        told = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == source:
            told[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else told
        dist.broadcast(told, src=source, group=self._control)
        return bytes(told.numpy()).decode()

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        self.gather([0.0])
