"""The one harness for tests on several processes: ranks joined by gloo on this machine.

    with Ranks(4) as ranks:
        results = ranks.run(function, *args)     # function(*args) on every rank, results by rank
        results = ranks.run(function, *args, world_size=2)     # the same with the first two alone

A rank that raises, dies or takes too long fails the test with that rank's own traceback or exit
code; the others are then ended, and the next `run` starts anew.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

GRACE = 5.0  # seconds for a process to end by itself


class RankError(AssertionError):
    """Says which rank failed and how."""


class Ranks:
    """Processes that stay alive between runs, because importing torch takes seconds."""

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        self.world_size, self.timeout = world_size, timeout
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._group = (0, world_size)  # number and size of the default process group

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        world_size: int | None = None,
    ) -> list[Any]:
        """function(*args) on every rank, which must be importable by name; the results by rank."""
        size = world_size or self.world_size
        if not self._processes:
            self._start()
        if size != self._group[1]:
            self._group = (self._group[0] + 1, size)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + (timeout or self.timeout)
        try:
            for pipe in self._pipes[:size]:
                pipe.send((function, args, self._group))
            while len(results) < size:
                self._collect(results, size, deadline)
        except BaseException:
            self.close()
            raise
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        """End the processes, each by its own id."""
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for work ends when its pipe does
        for process in self._processes:
            process.join(0.5 if process.is_alive() else 0)
        for end in ("terminate", "kill"):
            for process in self._processes:
                if process.is_alive():
                    getattr(process, end)()
            for process in self._processes:
                process.join(GRACE)
        self._processes, self._pipes = [], []
        self._group = (0, self.world_size)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # The store picks a free port itself and keeps it: no other process can take it in between
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self._store.port, self.timeout, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, results: dict[int, Any], size: int, deadline: float) -> None:
        missing = [rank for rank in range(size) if rank not in results]
        ready = wait([self._pipes[rank] for rank in missing], deadline - time.monotonic())
        if not ready:
            raise RankError(f"ranks {missing} of {size} did not finish in time")
        for rank in missing:
            if self._pipes[rank] not in ready:
                continue
            try:
                succeeded, value = self._pipes[rank].recv()
            except EOFError:
                self._processes[rank].join(GRACE)
                code = self._processes[rank].exitcode
                raise RankError(f"rank {rank} ended with exit code {code}") from None
            if not succeeded:
                raise RankError(f"rank {rank} of {size} failed:\n{value}")
            results[rank] = value


def _serve(rank: int, port: int, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    joined = None
    while True:
        try:
            function, args, group = pipe.recv()
        except EOFError:
            break
        try:
            if group != joined:
                _join(rank, *group, store, limit)
                joined = group
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            break  # its peers may wait for it: closing the group tells them
    if joined:
        dist.destroy_process_group()


def _join(rank: int, number: int, size: int, store: dist.Store, limit: timedelta) -> None:
    """The default group is now that of the first `size` ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    names = dist.PrefixStore(str(number), store)
    dist.init_process_group("gloo", store=names, rank=rank, world_size=size, timeout=limit)
