"""What runs have to say, for `dps report` and `dps audit`: reads the folders that training leaves.

Tables, figures and the page need no torch; only what shows samples reads evidence and images.
"""

import os
from contextlib import suppress
from pathlib import Path

from dps_dist.errors import naming


def write_whole(out: Path, content: bytes) -> Path:
    """Write beside `out` and rename: whoever looks sees the old file or the new one, whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with naming(out, made_as=partial):
            partial.write_bytes(content)
            partial.replace(out)
    finally:
        with suppress(OSError):  # of a read-only disk: the first error is the one to tell
            partial.unlink(missing_ok=True)
    return out
