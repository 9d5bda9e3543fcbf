"""The page in Debian's Chromium: nothing complained of, every figure seen, on a phone and wide."""

import numpy as np
import pytest

from dps_dist import recipes
from dps_dist.report import html, tables
from dps_dist.report.drawing import Album, Drawing
from dps_dist.report.markup import document
from tests.report import browser as browsers
from tests.report.folders import arrays, audit_stand_ins, evaluate, evaluation, learning, write_run

BOXES = """[...document.querySelectorAll('figure svg, img, .swatch')].map(e => {
  const box = e.getBoundingClientRect();
  return [box.left, box.right, box.width, box.height];
})"""
# Of each figure, how far what stands in its axes reaches, as shares of its width and height:
# curves, images, and patches that are filled or have a run's colour, which neither the axes' paper
# nor their frame has. Ticks and the grid are deeper, in groups of their own.
DRAWN = """[...document.querySelectorAll('figure svg')].map(svg => {
  const seen = e => [...e.querySelectorAll('path')].some(path => {
    const style = getComputedStyle(path), own = path.getAttribute('style');
    return own.includes('var(--run') ||
      !(style.fill == 'none' || style.opacity == 0 || style.fillOpacity == 0); });
  const inside = [...svg.querySelectorAll('g[id*="axes_"] > *')].filter(e =>
    e.matches('g[id*="line2d_"], g[id*="Collection_"], image') ||
    e.matches('g[id*="patch_"]') && seen(e) || e.querySelector(':scope > image'));
  const boxes = inside.map(e => e.getBoundingClientRect()), whole = svg.getBoundingClientRect();
  const reach = (from, to, size) => boxes.length ? (Math.max(...boxes.map(box => box[to])) -
    Math.min(...boxes.map(box => box[from]))) / whole[size] : 0;
  return [reach('left', 'right', 'width'), reach('top', 'bottom', 'height')];
})"""
# The heights of texts that stand upright; a turned one has the height of its length.
TEXTS = """[...document.querySelectorAll('figure svg text')].filter(e => {
  const to = e.getScreenCTM(); return e.textContent.trim() && Math.abs(to.b) < 1e-6 * to.a;
}).map(e => e.getBoundingClientRect().height)"""
TEXT_ON_PAPER = """[getComputedStyle(document.body).color,
  getComputedStyle(document.body).backgroundColor,
  getComputedStyle(document.querySelector('figure svg text')).fill]"""

pytestmark = pytest.mark.skipif(
    browsers.found() is None, reason="no Chromium: `make test` installs it"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = browsers.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two runs with everything that a page can show, one of them with a very long name."""
    tmp_path, rng = tmp_path_factory.mktemp("page"), np.random.default_rng(0)
    for k, (name, recipe) in enumerate([("dps", ""), ("n" * 70, "-te")]):
        folder = write_run(
            tmp_path / "runs" / name,
            [learning(j, 20, rng) for j in range(1, 21)],
            config=recipes.load(f"cifar10-resnet18{recipe}").model_dump(mode="json"),
            run={"recipe": f"cifar10-resnet18{recipe}"},
        )
        names = [
            "airplane",
            "automobile",
            "bird",
            *"cdefghi",
        ][:10]
        evaluate(folder, evaluation(seed=k, names=names, epoch=20), arrays(seed=k))
    folders = sorted((tmp_path / "runs").iterdir())
    with pytest.MonkeyPatch.context() as patched:
        audit_stand_ins(patched)
        return html.write([tables.read(folder) for folder in folders], tmp_path / "index.html")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_every_figure_is_seen(browser, page, width, dark):
    browser.said.clear()
    browser.open(page, width, dark)
    assert browser.said == []
    boxes = browser.ask(BOXES)
    assert len(boxes) > 25
    for left, right, wide, high in boxes:
        assert wide > 5 and high > 5 and left >= 0 and right <= width, (left, right, wide, high)
    for wide, high in browser.ask(DRAWN):
        assert wide > 0.3 and high > 0.3, (wide, high)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    broken = "[...document.images].filter(image => !image.naturalWidth).length"
    assert browser.ask(broken) == 0


def test_an_empty_figure_is_told_from_others(browser, tmp_path):
    empty = Drawing("empty", "nothing", "", lambda figure: figure.add_subplot().set_xlabel("epoch"))
    curve = Drawing("curve", "a curve", "", lambda figure: figure.add_subplot().plot([0, 1]))
    bars = Drawing("bars", "bars", "", lambda figure: figure.add_subplot().bar([0, 1], [1, 2]))
    file = tmp_path / "page.html"
    file.write_text(document("Figures", Album().panels([empty, curve, bars])))
    browser.open(file, 1600, dark=False)
    nothing, *others = browser.ask(DRAWN)
    assert nothing == [0, 0] and min(map(min, others)) > 0.5


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out(browser, page, dark):
    browser.open(page, 360, dark)
    ink, paper, soft = map(_luminance, browser.ask(TEXT_ON_PAPER))
    assert _contrast(ink, paper) > 7 and _contrast(soft, paper) > 4.5  # WCAG's AAA, and AA
    assert (paper < ink) == dark


def test_text_of_figures_is_large_enough_on_a_phone(browser, page):
    browser.open(page, 360, dark=False)
    heights = browser.ask(TEXTS)
    assert len(heights) > 100 and min(heights) > 8


def _luminance(colour):
    channels = np.array([float(part) for part in colour.split("(")[1].rstrip(")").split(",")[:3]])
    linear = np.where(
        channels <= 10, channels / 255 / 12.92, ((channels / 255 + 0.055) / 1.055) ** 2.4
    )
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _contrast(one, other):
    dark, light = sorted((one, other))
    return (light + 0.05) / (dark + 0.05)
