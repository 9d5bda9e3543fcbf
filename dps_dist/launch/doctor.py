"""Is this machine fit to run, and if not, what to do: the rows of `dps doctor`."""

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Literal

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """One row: `note` can be lived with, `bad` cannot; remedy says what to do about either."""

    what: str
    state: State
    found: str
    remedy: str = ""


def examine(folder: Path) -> Iterator[Finding]:
    """Every check, cheap ones first."""
    for check in (_python, _memory, lambda: _disk(folder), _shared_memory, _open_files):
        yield check()
    for what, check in (
        ("FFCV", _ffcv),
        ("turbojpeg", _turbojpeg),
        ("torch", _torch),
        ("GPU", _gpu),
        ("bfloat16", _bfloat16),
        ("collectives", _collectives),
        ("Ray", _ray),
    ):
        yield _guarded(what, check)


def _guarded(what: str, check: Callable[[], Finding]) -> Finding:
    """A check that fails in whatever way is a finding, not a traceback."""
    try:
        return check()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(what, "bad", reason, "run `make setup`")


def _noted(what: str, ok: bool, found: str, remedy: str) -> Finding:
    """Fine, or a note with what to do about it."""
    return Finding(what, "ok" if ok else "note", found, "" if ok else remedy)


def _python() -> Finding:
    return Finding("Python", "ok", sys.version.split()[0])  # pip has refused anything too old


def _memory() -> Finding:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    found = f"{free / 1e9:.1f} GB free, {len(os.sched_getaffinity(0))} cores"
    remedy = "close other programs: Ray and two workers want about 2 GB"
    return _noted("memory, cores", free > 2e9, found, remedy)


def _disk(folder: Path) -> Finding:
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    remedy = "ImageNet takes 65 to 350 GB as .beton; make room or work elsewhere"
    return _noted("disk", free > 5e9, f"{free / 1e9:.1f} GB free at {there}", remedy)


def _shared_memory() -> Finding:
    size = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    remedy = "give a container more, such as --shm-size=8g: Ray's object store is there"
    return _noted("/dev/shm", size > 1e9, f"{size / 1e9:.1f} GB", remedy)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft:,} (at most {hard:,})"
    return _noted("open files", hard >= 4096, found, "raise the limit: ulimit -n 65536")


def _ffcv() -> Finding:
    import dps_dist.data.loader  # noqa: F401

    return Finding("FFCV", "ok", version_of("ffcv"))


def _turbojpeg() -> Finding:
    from dps_dist.data.decode import decodes_jpeg

    if decodes_jpeg():
        return Finding("turbojpeg", "ok", "decodes a JPEG through FFCV")
    return Finding("turbojpeg", "bad", "decodes a JPEG wrongly", "install libturbojpeg0-dev, FFCV")


def _torch() -> Finding:
    import torch
    import torchvision

    return Finding("torch", "ok", f"{torch.__version__}, torchvision {torchvision.__version__}")


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "note", "none", "training runs on the CPU: right for demos and tests")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return Finding("GPU", "ok", f"{torch.cuda.device_count()} × {', '.join(sorted(names))}")


def _bfloat16() -> Finding:
    import torch

    from dps_dist.train.setup import cpu_has_bfloat16

    if torch.cuda.is_available():
        ok, found = torch.cuda.is_bf16_supported(False), "of the GPU"
    else:
        ok, found = cpu_has_bfloat16(), "of the CPU"
    remedy = "float16 on GPUs, none on CPUs: imitated bfloat16 is many times slower than float32"
    return _noted("bfloat16", ok, found if ok else "none", f"train.amp: {remedy}")


def _collectives() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("collectives", "bad", "no gloo in this torch", "run `make setup`")
    if torch.cuda.is_available() and not dist.is_nccl_available():
        return Finding("collectives", "bad", "GPUs but no NCCL", "install torch's CUDA build")
    nccl = "NCCL, " if dist.is_nccl_available() else ""
    return Finding("collectives", "ok", f"{nccl}gloo")


def _ray() -> Finding:
    import ray
    import ray.train
    import ray.tune

    return Finding("Ray", "ok", ray.__version__)
