"""The page in Debian's Chromium: nothing complained of, every figure seen, on a phone and wide."""

import numpy as np
import pytest

from dps_dist import recipes
from dps_dist.report import html, tables
from tests.report import browser as browsers
from tests.report.folders import arrays, audit_stand_ins, evaluate, evaluation, learning, write_run

BOXES = """[...document.querySelectorAll('figure svg, img, .swatch')].map(e => {
  const box = e.getBoundingClientRect();
  return [box.left, box.right, box.width, box.height];
})"""
# What is drawn in a figure, beyond its frame: an empty one has a box too.
DRAWN = """[...document.querySelectorAll('figure svg')].map(e => {
  const box = e.getBBox(); return Math.min(box.width, box.height);
})"""
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
            run={"command": f"dps train cifar10-resnet18{recipe}"},
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
    assert min(browser.ask(DRAWN)) > 50
    assert browser.ask("document.documentElement.scrollWidth") <= width
    broken = "[...document.images].filter(image => !image.naturalWidth).length"
    assert browser.ask(broken) == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out(browser, page, dark):
    browser.open(page, 360, dark)
    ink, paper, soft = map(_luminance, browser.ask(TEXT_ON_PAPER))
    assert _contrast(ink, paper) > 7 and _contrast(soft, paper) > 4.5  # WCAG's AAA, and AA
    assert (paper < ink) == dark


def test_text_of_figures_is_large_enough_on_a_phone(browser, page):
    browser.open(page, 360, dark=False)
    heights = """[...document.querySelectorAll('figure svg text')]
        .map(e => Math.max(e.getBoundingClientRect().height, e.getBoundingClientRect().width))"""
    assert min(h for h in browser.ask(heights) if h) > 5


def _luminance(colour):
    channels = np.array([float(part) for part in colour.split("(")[1].rstrip(")").split(",")[:3]])
    linear = np.where(
        channels <= 10, channels / 255 / 12.92, ((channels / 255 + 0.055) / 1.055) ** 2.4
    )
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _contrast(one, other):
    dark, light = sorted((one, other))
    return (light + 0.05) / (dark + 0.05)
