"""The Makefile, with programs that only say that they were called."""

import os
import shutil
import subprocess

import pytest

from tests.shown import ROOT

PYTHON = """#!/bin/sh
case "$*" in
"-m venv "*) touch venv ;;
*version_info*) sleep 1; exit 1 ;;
esac
"""


@pytest.mark.parametrize("jobs", ["-j1", "-j4"])
def test_nothing_is_installed_before_the_machine_is_seen_to_do(tmp_path, jobs):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python3", "g++", "pkg-config"):
        (programs / name).write_text(PYTHON)
        (programs / name).chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    call = ["make", jobs, "setup"]
    done = subprocess.run(call, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True)
    assert done.returncode and "python3 is older than 3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_what_only_some_tests_need_may_be_missing(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("apt-get", "sudo"):
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
        (programs / name).chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    call = ["make", "system", "FOR_TESTS=no-such-package"]
    done = subprocess.run(call, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no-such-package could not be installed: the tests that need it are sk" in done.stderr
