"""Runs that were evaluated, and stand-ins for what takes long."""

from html import escape

import pytest

from dps_dist.report import drawing, tables
from tests.report.folders import arrays, audit_stand_ins, evaluate, evaluation, rows, write_run
from tests.report.pages import SEEN


@pytest.fixture
def really():
    """Of a test that looks at what is drawn."""


@pytest.fixture
def undrawn(request, monkeypatch):
    """Most look at the text, and need not wait for matplotlib."""
    if "really" not in request.fixturenames:
        monkeypatch.setattr(drawing, "drawn", lambda figure: None)
        monkeypatch.setattr(
            drawing, "for_page", lambda _, key, alt: f'<svg {SEEN}="{escape(alt)}"/>'
        )


@pytest.fixture
def evaluated(tmp_path):
    return tables.read(evaluate(write_run(tmp_path / "runs/a", rows())))


@pytest.fixture
def two(tmp_path, evaluated):
    other = write_run(tmp_path / "runs/b", rows(seed=1), config={"method": {"name": "baseline"}})
    facts = evaluation(seed=1, scaled=False)
    return [evaluated, tables.read(evaluate(other, facts, arrays(seed=1)))]


@pytest.fixture
def audited(monkeypatch):
    return audit_stand_ins(monkeypatch)
