# Needs python3 (3.10 or newer, with venv), make and git. Every target makes its venv first where it is missing or old.
PYTHON ?= python3
JOBS ?= 2
ARGS ?=
PORT ?= 8888
# TORCH=2.15.0 works with that torch, in an environment of its own: make test-all TORCH=2.15.0 PYTHON=python3.12
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
PY := $(VENV)/bin/python
PEERS := .venv-peers/bin/python
ZOO := .venv-zoo/bin/python
# the slow rest has one process more than that: browsers wait
TESTS = $(PY) -m pytest -n $(JOBS) --dist loadgroup --durations=10
PIP := -m pip install -q --disable-pip-version-check
INSTALL := $(PIP) -c constraints.txt
FOUND = command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here: make PYTHON=/path/to/python3" >&2; exit 1; }

# $(call timed,command,name): run it, say how long it took, and end as it ended. Pytest's 5 is "nothing selected".
timed = start=$$(date +%s); { $(1); }; code=$$?; s=$$(($$(date +%s)-start)); \
	echo "$(2) took $$((s/60)) min $$((s%60)) s"; exit $$code

.DEFAULT_GOAL := help
.PHONY: help demo test test-all peers zoo docs lab bench gpu study measure mutants release clean chromium

help:    ## This list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/ready    ## Hide a message in a photo, through a JPEG; ARGS="--device cuda --image my.jpg"
	$(PY) -m shok_nb.demo $(ARGS)

test: $(VENV)/ready    ## In minutes: notebooks, export, README, metadata, every law; ARGS="-k soft"
	@$(call timed,$(TESTS) -m "not slow" $(ARGS),make test)

ifndef TORCH
test-all: chromium test    ## make chromium, make test, and then the slow rest, the site among it; TORCH=2.15.0 PYTHON=...: all with that torch, for the table of versions
	@$(call timed,$(TESTS) -n $$(($(JOBS)+1)) -m slow $(ARGS) || [ $$? = 5 ],the rest of make test-all)
else
test-all: chromium $(VENV)/ready
	@$(call timed,$(TESTS) --junitxml=$(VENV)/tests.xml $(ARGS); ran=$$?; \
		$(if $(ARGS),,$(PY) bench/versions.py $(VENV)/tests.xml;) (exit $$ran),make test-all)
endif

peers: .venv-peers/ready    ## Compare with other packages, and run the trainers' callbacks; ARGS="-k fsq"
	$(PEERS) -m pytest tests/peers tests/test_schedules.py $(ARGS)

zoo: .venv-zoo/ready    ## Networks of torchvision and transformers to ONNX Runtime, in a table; ARGS="--all", ARGS="--failed"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ZOO) bench/zoo.py $(ARGS)

docs: $(VENV)/ready    ## The site, in docs/_build/html; warnings are errors, no network is used
	@mkdir -p docs/nbs
	$(PY) tests/pages.py $(JOBS)
	$(PY) -m sphinx -W --keep-going -q -j $(JOBS) -c docs docs/nbs docs/_build/html
	@echo "Open docs/_build/html/index.html"

lab: $(VENV)/ready    ## All notebooks in JupyterLab at localhost, the sliders live; PORT=8889
	@echo "JupyterLab runs at http://localhost:$(PORT)/lab, or on the next free port it names; Ctrl-C ends it"
	$(PY) -m jupyter lab --ServerApp.root_dir=nbs --LabApp.default_url=/lab/tree/show/20_widgets.ipynb --port $(PORT) $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

bench: $(VENV)/ready    ## The benchmarks, about 25 minutes; ARGS="--quick", ARGS="--part small peers"
	$(PY) bench/bench.py $(ARGS)

gpu: $(VENV)/ready    ## What only a CUDA GPU can check, and the benchmarks there; writes the tables to commit
	$(PY) bench/gpu.py
	$(PY) bench/bench.py --device cuda $(ARGS)

study: $(VENV)/ready    ## Every estimator on tasks whose best result is known, at most 65 minutes, resumes; ARGS="--only lattice --quick"
	OMP_NUM_THREADS=1 $(PY) bench/study.py $(ARGS)
	$(if $(ARGS),,$(PY) bench/programs.py && $(PY) bench/tokens.py && $(PY) bench/low_precision.py)

measure: $(VENV)/ready    ## Sizes of pages, calls and files, beside those of the last release; ARGS="--save" at a release
	@$(PY) bench/measure.py $(ARGS)

mutants: $(VENV)/ready    ## Do the tests notice? 300 small changes to the engine; ARGS="core --count 40"
	$(PY) tests/mutants.py --jobs $(JOBS) $(ARGS)

release: $(VENV)/ready    ## Build what would be uploaded, check it, and stop there
	$(PY) .ci/release.py

clean:    ## Remove what the other commands made, but not the venvs
	rm -rf docs/nbs docs/_build build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

# Another torch chooses its own sympy and setuptools.
$(VENV)/ready: settings.ini setup.py pyproject.toml constraints.txt
	@$(FOUND)
	@$(PYTHON) tests/old_python.py
	@echo "Installing into $(VENV); this takes a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),{ grep -vE '^(torch|sympy|setuptools)==' constraints.txt; echo "torch==$(TORCH)"; },cat constraints.txt) > $(VENV)/constraints.txt
	$(PY) $(PIP) -c $(VENV)/constraints.txt 'setuptools>=77' $(if $(TORCH),torch)
	$(PY) $(PIP) -c $(VENV)/constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

.venv-peers/ready: settings.ini setup.py pyproject.toml constraints.txt tests/peers/requirements.txt
	@$(FOUND)
	@$(PYTHON) tests/old_python.py
	@echo "Installing into .venv-peers: Python 3.11 and 1.1 GB beside torch"
	$(PYTHON) -m venv .venv-peers
	$(PEERS) $(INSTALL) 'setuptools>=77'
	$(PEERS) $(INSTALL) --no-build-isolation -e . pytest
	$(PEERS) $(INSTALL) --no-deps -r tests/peers/requirements.txt
	@touch $@

# torchvision's wheel asks for a torch with CUDA: --no-deps takes it beside any.
.venv-zoo/ready: settings.ini setup.py pyproject.toml constraints.txt
	@$(FOUND)
	@$(PYTHON) tests/old_python.py
	@echo "Installing into .venv-zoo: 0.3 GB beside torch"
	$(PYTHON) -m venv .venv-zoo
	$(ZOO) $(INSTALL) 'setuptools>=77'
	$(ZOO) $(INSTALL) --no-build-isolation -e '.[onnx]' pillow scikit-learn
	$(ZOO) $(INSTALL) transformers==5.23.0
	$(ZOO) $(PIP) --no-deps torchvision==0.28.0
	@touch $@

chromium:    ## Install the browser of the browser tests with apt-get, which root may; they skip without it
	@{ command -v chromium && command -v chromedriver; } >/dev/null && exit; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing chromium and chromium-driver with apt-get, for the browser tests"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null; \
	fi || true; command -v chromedriver >/dev/null || echo "No chromium here: the browser tests will skip"
