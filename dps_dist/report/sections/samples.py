"""The samples whose evidence left their label farthest, with their images."""

from collections.abc import Sequence
from typing import Any

from dps_dist.errors import InputError
from dps_dist.report.markup import heading, paragraph, sample, section, soft
from dps_dist.report.tables import Run, labels

SHOWN = 24  # samples on a page, of all runs
SIDE = 96  # pixels of an image at most


def most_changed(runs: Sequence[Run]) -> str:
    each = max(6, SHOWN // len(runs))
    parts = []
    for run, label in zip(runs, labels(runs), strict=True):
        try:
            parts.append((heading(label) if len(runs) > 1 else "") + _samples(run, each))
        except InputError as error:
            parts.append(paragraph(f"{label}: none are shown, because {str(error).rstrip('.')}."))
        except UnicodeEncodeError:  # of pyarrow, which opens no such file
            parts.append(paragraph(f"{label}: none are shown: its folder's name is not UTF-8."))
    about = "Training samples whose evidence is farthest from the label that they were given."
    any_shown = any("<img" in part for part in parts)
    return section("Most changed samples", paragraph(about) if any_shown else "", *parts)


def _samples(run: Run, most: int) -> str:
    from dps_dist.data.pictures import pictures
    from dps_dist.report.audit import rank, suggestions
    from dps_dist.train.storage import Storage
    from dps_dist.train.trained import read_config

    rows: list[dict[str, Any]] = suggestions(rank(run.folder)).slice(0, most).to_pylist()
    if not rows:
        return paragraph("The evidence of every sample is greatest at its label.")
    data = read_config(Storage(run.folder)).data
    images = pictures(data, "train", [int(row["index"]) for row in rows], side=SIDE)
    items = [_item(row, image) for row, image in zip(rows, images, strict=True)]
    return f'<ul class="samples">\n{"".join(items)}</ul>\n'


def _item(row: dict[str, Any], image: bytes) -> str:
    which = soft(f"sample {int(row['index']):,}")
    evidence = soft(
        f"evidence {_short(row['suggested_evidence'])} against {_short(row['label_evidence'])}"
    )
    return sample(row, image, which + evidence + (soft(str(row["path"])) if row["path"] else ""))


def _short(value: Any) -> str:
    return f"{float(value):.3g}" if isinstance(value, int | float) else "–"
