"""A .beton mapped into memory, in place of FFCV's own reader of the same.

FFCV's keeps Python sets of every sample's pages, which only its other cache reads (for ImageNet's
1.3 million images some seconds and hundreds of megabytes in each loader of each rank). `loader.py`
reads through it.
"""

from typing import Any

import numpy as np

from dps_dist.data.ffcv import Compiler, OSCacheContext, OSCacheManager, Reader, loader_module
from dps_dist.data.ffcv import Loader as FFCVLoader


class MappedBeton(OSCacheManager):  # type: ignore[misc]
    """Where each stored image begins and how long it is, sorted, over the mapped file."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        by_place = np.argsort(reader.alloc_table["ptr"])
        self.ptrs = reader.alloc_table["ptr"][by_place]
        self.sizes = reader.alloc_table["size"][by_place]
        self.context = OSCacheContext(self)

    def compile_reader(self) -> None:
        """None: `decode.py` reads by itself. FFCV's edits one of numba's shared types, after which
        numba fails on functions that it compiled before."""


class MappedLoader(FFCVLoader):  # type: ignore[misc]
    """FFCV's Loader on a MappedBeton; it looks its reader up by name and takes no other."""

    def __init__(self, *args: Any, **options: Any) -> None:
        loader_module.OSCacheManager = MappedBeton
        try:
            super().__init__(*args, **options)
        finally:
            loader_module.OSCacheManager = OSCacheManager

    def generate_code(self) -> None:
        """Without compiling: our decoder comes compiled."""
        compiles = Compiler.is_enabled
        Compiler.set_enabled(False)
        try:
            super().generate_code()
        finally:
            Compiler.set_enabled(compiles)
