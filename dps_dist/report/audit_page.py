"""The labels that the evidence leaves furthest, with their images: one page, no network, no script.

It has the look of the report, `html.py`.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa

from dps_dist.data.pictures import LEAST_SIDE, pictures
from dps_dist.errors import InputError
from dps_dist.report import write_whole
from dps_dist.report.audit import THRESHOLD, agreement, suggestions
from dps_dist.report.markup import document, paragraph, sample, section, soft, tiles
from dps_dist.report.values import Cell, percent
from dps_dist.train.storage import Storage
from dps_dist.train.trained import read_config

SIDE = 192  # pixels of a picture, at most

BARS = """
.bar { display: grid; grid-template-columns: 1fr 3.2rem; gap: .4rem; align-items: center;
  width: 100%; max-width: 9rem; font-size: .8rem; font-variant-numeric: tabular-nums; }
.bar span { height: .5rem; border-radius: 2px; background: var(--line); }
.bar span i { display: block; height: 100%; border-radius: 2px; min-width: 1px; }
.given { background: var(--run1); }
.suggested { background: var(--run0); }
.pixels { image-rendering: pixelated; }
"""


def check(out: Path) -> None:
    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--html is {out}: give a page's name, such as audit.html")


def write(
    run: str | Path,
    table: pa.Table,
    out: str | Path,
    top: int = 100,
    threshold: float = THRESHOLD,
) -> Path:
    """The page of the first `top` suggestions of a ranking that `audit.rank` made of the run."""
    out = Path(out)
    check(out)
    if top < 1:
        raise InputError(f"--top is {top}: give 1 or more")
    storage = Storage(run)
    data = read_config(storage).data
    rows = suggestions(table, threshold).slice(0, top).to_pylist()
    images = pictures(data, "train", [row["index"] for row in rows], SIDE)
    text = page(storage.name, table, rows, images, pixels=data.resolution <= LEAST_SIDE)
    return write_whole(out, text.encode("utf-8", "backslashreplace"))


def page(
    name: str,
    table: pa.Table,
    rows: list[dict[str, Any]],
    images: list[bytes],
    pixels: bool = False,
) -> str:
    """The page of some of a ranking's rows and their PNGs; pixels: do not scale them smoothly."""
    title = f"Labels to look at: {name}"
    cards = "".join(_card(row, image, pixels) for row, image in zip(rows, images, strict=True))
    shown = f'<ol class="samples">\n{cards}</ol>\n' if rows else ""
    note = (
        "The evidence is the discounted mean of the model's own predictions for a sample. Shown "
        f"are the {len(rows)} samples with the least evidence for their label, of those where it "
        "prefers another class: given label → suggested label, the evidence for each, and the "
        "score, which is what leaves the label."
        if rows
        else "The evidence prefers no other class to a label: there is nothing to suggest."
    )
    sections = section("All labels", _counts(table)) + section("Samples", paragraph(note), shown)
    return document(title, sections, style=BARS)


def _counts(table: pa.Table) -> str:
    found = agreement(table)
    titles, cells = ["samples", "labels agreed with"], [f"{found['samples']:,}"]
    cells.append(percent(found["agree"]))
    for threshold, count in found["suggested"].items():
        titles.append(f"another by more than {threshold:g}")
        cells.append(f"{count:,}")
    return tiles(titles, [Cell(text) for text in cells])


def _card(row: dict[str, Any], image: bytes, pixels: bool) -> str:
    bars = _bar("given", row["label_evidence"]) + _bar("suggested", row["suggested_evidence"])
    score = soft(f"score {row['score']:.3f}, {row['visits']} visits")
    which = soft(f"{row['index']}: {row['path']}")
    return sample(row, image, bars + score + which, look="pixels" if pixels else "")


def _bar(kind: str, share: float) -> str:
    width = f"{100 * share:.1f}%"
    return (
        f'<div class="bar" title="evidence for the {kind} label"><span><i class="{kind}" '
        f'style="width:{width}"></i></span>{width}</div>\n'
    )
