"""Writing one .beton with several processes that end together, whatever happens to any of them.

FFCV's own driver of its writer waits for ever when a process dies or Ctrl-C comes; its file format,
table and pages are used as they are. `write.py` calls `write_beton`.
"""

import ctypes
import errno
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dps_dist.data.ffcv import (
    DatasetWriter,
    IntField,
    MemoryAllocator,
    RGBImageField,
    handle_sample,
)
from dps_dist.data.manifest import FIELDS
from dps_dist.errors import InputError


class Samples(Protocol):
    """(image, label, index) by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> tuple[Any, int, int]: ...


CHUNK = 64  # samples that a writer takes at a time
SHARED = Path("/dev/shm")  # where what processes share lies
_PR_SET_PDEATHSIG = 1


def write_beton(
    target: Path,
    samples: Samples,
    image: RGBImageField,
    page_size: int,
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Write (image, label, index) samples; `progress` is told now and then how many are done."""
    fields = dict(zip(FIELDS, (image, IntField(), IntField()), strict=True))
    writer = DatasetWriter(str(target), fields, page_size=page_size)
    writer.num_samples = len(samples)
    writer.prepare()  # the header, and memory for the table that the processes share
    try:
        with _sharing():
            _reserve(writer.metadata_sm)
            allocator = MemoryAllocator(str(target), writer.data_region_start, page_size)
        places = _run(writer, allocator, samples, workers, progress)
        _check_whole(target, allocator)
        with _without_interrupts():  # it would take one for a failure and write an empty table
            writer.finalize(places)
    finally:
        writer.metadata_sm.unlink()
        with suppress(BufferError):  # numpy may still look at it; the process's end frees it
            writer.metadata_sm.close()


@contextmanager
def _sharing() -> Iterator[None]:
    """Its failures do not say that they are about memory and not about the disk."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{SHARED} has no room for what the writing processes share ({error.strerror}): make "
            "room there, or give the container more (--shm-size)"
        ) from None


def _reserve(memory: SharedMemory) -> None:
    """Where there is no room for it, it is refused now; else a write into it would kill."""
    with (SHARED / memory.name).open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, memory.size)


def _check_whole(target: Path, allocator: MemoryAllocator) -> None:
    """FFCV does not look whether a page was written whole; behind a short one all others shift."""
    pages = allocator.next_page_allocated.value
    if target.stat().st_size != allocator.offset + pages * allocator.page_size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))


def _run(
    writer: DatasetWriter,
    allocator: MemoryAllocator,
    samples: Samples,
    workers: int,
    progress: Callable[[int], None],
) -> list[tuple[int, int, int]]:
    """The places (sample, pointer, size) of all images, which the processes wrote."""
    fork = multiprocessing.get_context("fork")  # samples are shared, not pickled
    with _sharing():
        taken, done = fork.Value("q", 0), fork.Value("q", 0)
    processes, pipes, places = [], [], []
    try:
        with _without_interrupts():
            for _ in range(workers):
                ours, theirs = fork.Pipe(duplex=False)
                work = (os.getpid(), theirs, writer, allocator, samples, taken, done)
                process = fork.Process(target=_serve, args=work, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
        while pipes:
            for pipe in wait(pipes, timeout=0.1):
                assert isinstance(pipe, Connection)
                places.extend(_result(pipe, Path(writer.fname).parent))
                pipes.remove(pipe)
            progress(done.value)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return places


def _result(pipe: Connection, folder: Path) -> list[tuple[int, int, int]]:
    try:
        places, failure = pipe.recv()
    except EOFError:
        places, failure = [], "it was killed, likely for want of memory"
    if failure:
        raise InputError(
            f"a process that writes to {folder} ended early ({failure}): "
            "make room, or run again with fewer --workers"
        )
    found: list[tuple[int, int, int]] = places
    return found


def _serve(
    parent: int,
    pipe: Connection,
    writer: DatasetWriter,
    allocator: MemoryAllocator,
    samples: Samples,
    taken: Any,
    done: Any,
) -> None:
    """A writer process: takes chunk after chunk until none is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that was said
        return
    table = np.frombuffer(writer.metadata_sm.buf, writer.metadata_type)
    try:
        with allocator:
            while (start := _next(taken, CHUNK)) < len(samples):
                for i in range(start, min(start + CHUNK, len(samples))):
                    names = writer.metadata_type.names
                    handle_sample(samples[i], i, names, table, allocator, writer.fields)
                _next(done, min(CHUNK, len(samples) - start))
        pipe.send((allocator.allocations, None))
    except OSError as error:
        pipe.send(([], error.strerror or str(error)))
    except Exception as error:  # of FFCV, which knows no better
        pipe.send(([], f"{type(error).__name__}: {error}"))
    os._exit(0)  # what the parent set up is not this process's to take down


def _next(counter: Any, step: int) -> int:
    with counter.get_lock():
        before: int = counter.value
        counter.value = before + step
    return before


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A Ctrl-C that would be lost waits until after, whichever thread the kernel hands it to."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for waited in came:
            signal.raise_signal(waited)
