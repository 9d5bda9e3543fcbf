"""How the page looks: light and dark, on a phone and on a wide screen."""

from dps_dist.report.drawing import COLOURS, ON_DARK


def css() -> str:
    light = "".join(f"--run{k}: {colour}; " for k, colour in enumerate(COLOURS))
    dark = "".join(f"--run{k}: {colour}; " for k, colour in enumerate(ON_DARK))
    return f"""\
:root {{ --ink: #1b1f24; --soft: #5f6772; --line: #d9dde2; --paper: #ffffff; --box: #f4f6f8;
  {light}}}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e9ed; --soft: #9aa4b0; --line: #343b44; --paper: #14181d; --box: #1d232a;
    {dark}}}
}}
{RULES}"""


RULES = """\
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem clamp(1rem, 4vw, 2.5rem) 4rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
h1 { margin: 0; font-size: clamp(1.5rem, 5vw, 2rem); line-height: 1.2; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.2rem; }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; }
p { margin: .5rem 0; max-width: 48rem; }
.soft { color: var(--soft); font-size: .875rem; font-weight: normal; }
code { font: .95em ui-monospace, monospace; background: var(--box); padding: .1em .3em;
  border-radius: 4px; color: var(--ink); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .45rem .9rem; border-bottom: 1px solid var(--line); text-align: left;
  font-weight: normal; vertical-align: top; overflow-wrap: normal; }
thead th { color: var(--soft); font-size: .875rem; vertical-align: bottom; }
tbody th { overflow-wrap: anywhere; min-width: 8.5rem; width: 30%; }
tr > :first-child { padding-left: 0; position: sticky; left: 0; background: var(--paper); }
tr > :last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
thead .number { white-space: normal; }
th .soft { display: block; }
.boxed { white-space: nowrap; width: 1%; background: var(--box); border-left: 2px solid var(--soft);
  border-right: 2px solid var(--soft); }
tr > .boxed:last-child { padding-right: .9rem; }
.tiles { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 0 0 1rem; }
dt { color: var(--soft); font-size: .875rem; }
dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: 0 0 1rem; padding: 0;
  list-style: none; font-size: .9rem; }
.legend li { display: flex; align-items: baseline; }
.swatch { flex: none; width: 1.75rem; height: .5rem; margin-right: .5rem; }
.panels, .squares { display: grid; gap: 1.5rem 2rem; grid-template-columns: 1fr; }
.squares { grid-template-columns: repeat(auto-fill,
  minmax(min(100%, max(19rem, (100% - 4rem) / var(--abreast))), 1fr)); }
.squares figure { max-width: 27rem; }
.squares + .squares, .panels + .panels { margin-top: 1.5rem; }
@media (min-width: 44rem) { .panels { grid-template-columns: 1fr 1fr; } }
@media (max-width: 44rem) { th, td { padding: .4rem .5rem; font-size: .9rem; } }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: system-ui, sans-serif !important; }
figure svg image { image-rendering: pixelated; }
figcaption { font-weight: 600; }
.samples { display: grid; gap: 1.25rem 1rem; margin: 1rem 0; padding: 0; list-style: none;
  grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); }
.samples img { display: block; width: 7rem; height: 7rem; object-fit: contain;
  object-position: left; margin-bottom: .35rem; }
.samples b { display: block; font-size: .9rem; line-height: 1.3; }
.samples .soft { display: block; font-size: .8rem; line-height: 1.4; }
pre { margin: .5rem 0; padding: .75rem 1rem; overflow-x: auto; background: var(--box);
  border-radius: 6px; font: .85rem/1.5 ui-monospace, monospace; }
.command { white-space: pre-wrap; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--soft); font-size: .875rem; }
@media print { .scroll, pre { overflow: visible; white-space: pre-wrap; } }"""
