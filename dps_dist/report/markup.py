"""The page's parts: sections, tables, tiles, legends. All text is escaped here."""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dps_dist.report.css import css
from dps_dist.report.drawing import colour, dash
from dps_dist.report.values import Cell


def document(
    title: str, sections: str, *, about: str = "", style: str = "", refresh: int = 0
) -> str:
    """A whole page that needs nothing but itself. style: beyond what all pages have; refresh: every
    so many seconds, while it still changes."""
    again = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    under = f'<p class="soft">{escape(about)}</p>\n' if about else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{again}<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{css()}{style}
</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{under}</header>
<main>
{sections}
</main>
</body>
</html>
"""


def section(title: str, *parts: str) -> str:
    """Nothing, where there is nothing in it."""
    if not any(parts):
        return ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>\n"


def paragraph(text: str) -> str:
    """Soft; what stands between ` is code."""
    shown = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
    return f'<p class="soft">{shown}</p>\n'


def sample(row: Mapping[str, Any], image: bytes, below: str, look: str = "") -> str:
    """Of a list of class `samples`: a row of an audit with its PNG. look: a class of the image."""
    given, suggested = escape(str(row["label_name"])), escape(str(row["suggested_name"]))
    own = f'class="{look}" ' if look else ""
    return (
        f'<li><img {own}alt="sample {int(row["index"])}, labelled {given}" '
        f'src="data:image/png;base64,{b64encode(image).decode()}">\n'
        f"<b>{given} → {suggested}</b>\n{below}</li>\n"
    )


def soft(text: str) -> str:
    return f'<span class="soft">{escape(text)}</span>\n'


def details(summary: str, inner: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n{inner}</details>\n"


def tiles(titles: Sequence[str], cells: Sequence[Cell]) -> str:
    """One run's figures: there is nothing to compare, so they need not stand in columns."""
    pairs = [
        f"<div><dt>{escape(title)}</dt><dd>{escape(cell.text)}</dd></div>\n"
        for title, cell in zip(titles, cells, strict=True)
    ]
    return f'<dl class="tiles">\n{"".join(pairs)}</dl>\n'


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    text_columns: int,
    marked: int | None = None,
) -> str:
    """`text_columns`: how many stand left; the others are numbers. `marked`: one in a box."""

    def row(tag: str, cells: Sequence[Cell]) -> str:
        written = []
        for k, cell in enumerate(cells):
            name = "th" if k == 0 or tag == "th" else "td"
            scope = ' scope="col"' if tag == "th" else ' scope="row"' if k == 0 else ""
            looks = [
                *(["number"] if k >= text_columns else []),
                *(["boxed"] if k == marked else []),
            ]
            look = f' class="{" ".join(looks)}"' if looks else ""
            text = re.sub(r"\.(?=[a-z])", ".<wbr>", escape(cell.text))  # fields may be broken there
            text = f"<b>{text}</b>" if cell.best else text
            text += f'<span class="soft">{escape(cell.note)}</span>' if cell.note else ""
            written.append(f"<{name}{scope}{look}>{text}</{name}>")
        return f"<tr>{''.join(written)}</tr>\n"

    head, body = row("th", [Cell(title) for title in titles]), "".join(row("td", r) for r in rows)
    return (
        '<div class="scroll" tabindex="0"><table>\n'
        f"<thead>\n{head}</thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def legend(names: Sequence[str]) -> str:
    """Which line is whose; nothing, where there is but one."""
    if len(names) < 2:
        return ""
    entries = [f"<li>{_swatch(k)}{escape(name)}</li>" for k, name in enumerate(names)]
    return f'<ul class="legend">{"".join(entries)}</ul>\n'


def _swatch(k: int) -> str:
    style = dash(k)
    dashes = "" if isinstance(style, str) else " ".join(str(2 * length) for length in style[1])
    return (
        '<svg class="swatch" viewBox="0 0 28 8" aria-hidden="true"><line x1="0" y1="4" x2="28" '
        f'y2="4" stroke-width="3" stroke-dasharray="{dashes}" style="stroke:{colour(k)}"/></svg>'
    )
