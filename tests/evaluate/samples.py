"""Logits and labels that the tests of the figures share."""

import torch
from hypothesis import strategies as st

from dps_dist.evaluate.metrics import Tally


def rows(n, classes, seed=0, scale=3.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, classes, generator=generator)
    likely = logits.argmax(1)
    anything = torch.randint(classes, (n,), generator=generator)
    right = torch.rand(n, generator=generator) < 0.6
    return logits.to(dtype), torch.where(right, likely, anything)


# Few different values, so that most rows have ties
tied_rows = st.integers(1, 9).flatmap(
    lambda classes: st.lists(
        st.tuples(
            st.lists(
                st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 40.0]),
                min_size=classes,
                max_size=classes,
            ),
            st.integers(0, classes - 1),
        ),
        min_size=1,
        max_size=20,
    )
)


def figures_of(logits, labels, bins=15):
    """What a `Tally` makes of every row once."""
    tally = Tally(bins)
    tally.add(logits, labels, torch.ones(len(labels)))
    return tally.figures()


def tensors(table):
    """logits [N, K] and labels [N] of what `tied_rows` draws."""
    return torch.tensor([row for row, _ in table]), torch.tensor([label for _, label in table])
