"""Many rows of logits a part at a time: 50,000 of 1,000 classes are 400 MB in float64."""

from collections.abc import Iterator

from torch import Tensor

ELEMENTS = 1 << 18  # of a part, 2 MB in float64: what is computed from it stays in the cache


def chunks(rows: Tensor, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of rows [N, K], float64 on the CPU, with the same parts of `more` [N, …]."""
    assert rows.ndim == 2 and all(len(rows) == len(other) for other in more)
    size = max(1, ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, max(1, len(rows)), size):  # of no rows, one part
        first, *others = (tensor[start : start + size].detach().cpu() for tensor in (rows, *more))
        yield first.double(), *others
