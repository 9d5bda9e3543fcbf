# make demo | test | lint | bench: each does everything from a bare clone, and skips what is done.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help demo test lint bench setup system
.DEFAULT_GOAL := help

help:
	@echo "make demo   train on noisy labels with and without DPS, and compare"
	@echo "make test   lint, then every test"
	@echo "make lint   ruff, mypy, import rules"
	@echo "make bench  every figure of the README (QUICK=1 for a fast look)"

demo: setup
	$(BIN)/dps prepare digits data/digits
	rm -rf runs/demo
	$(BIN)/dps train digits-sym40 --set method.name=baseline --out runs/demo --name baseline
	$(BIN)/dps train digits-sym40 --out runs/demo --name dps
	$(BIN)/dps report runs/demo/baseline runs/demo/dps

test: FOR_TESTS = chromium prometheus
test: lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy dps_dist $(wildcard tune/*.py)
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks $(if $(QUICK),--quick) $(if $(CIFAR10),--cifar10 $(CIFAR10))

setup: system $(STAMP)

$(STAMP): pyproject.toml constraints.txt | system
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# What FFCV compiles against and what a virtual environment needs; for the tests also a browser and Prometheus, without which some
# of them are skipped. Installed only where missing. (Debian starts the Prometheus that it installs; the tests start their own.)
system:
	@missing=""; wanted=""; as=""; [ "$$(id -u)" = 0 ] || as="sudo"; \
	install() { $$as apt-get update -qq && $$as env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$$@" >/dev/null; }; \
	refuse() { echo "make: $$1" >&2; exit 1; }; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	command -v pkg-config >/dev/null || missing="$$missing pkg-config"; \
	pkg-config --exists libturbojpeg 2>/dev/null || missing="$$missing libturbojpeg0-dev"; \
	pkg-config --exists opencv4 2>/dev/null || missing="$$missing libopencv-dev"; \
	command -v $(PYTHON) >/dev/null || missing="$$missing $(notdir $(PYTHON))"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing $(notdir $(PYTHON))-venv"; \
	$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null || missing="$$missing $(notdir $(PYTHON))-dev"; \
	browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }; \
	for package in $(FOR_TESTS); do \
	  case $$package in chromium) browser;; *) command -v $$package;; esac >/dev/null || wanted="$$wanted $$package"; \
	done; \
	if [ -n "$$missing" ]; then \
	  command -v apt-get >/dev/null || refuse "this machine lacks$$missing (Debian's names): install them, then run make again"; \
	  [ -z "$$as" ] || { command -v sudo >/dev/null && sudo -v; } || refuse "this machine lacks$$missing and you are neither root nor allowed sudo: ask its administrator to run 'apt-get install$$missing', then run make again"; \
	  echo "installing$$missing"; \
	  install $$missing || refuse "apt-get could not install$$missing: install what stands for them here, then run make again"; \
	fi; \
	for package in $$wanted; do \
	  echo "installing $$package"; \
	  install $$package 2>/dev/null || echo "make: $$package could not be installed: the tests that need it are skipped" >&2; \
	done
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11: install a newer one and run make PYTHON=python3.12 (or its path)" >&2; exit 1; }
