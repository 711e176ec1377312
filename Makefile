# Every target sets itself up: `make demo` and `make test` are all a newcomer needs.
PY := .venv/bin/python
VIEW := build/view/forebay
BENCHES := checkpoint loader lockstep staging eviction stager api
PACKAGES := core tiers stager checkpointd loaders api benchmarks

.PHONY: setup browser demo test lint types bench faults clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt tiers/_native.c
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --upgrade setuptools wheel
	$(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

# mypy and import-linter look at files, so they see the namespace through links.
$(VIEW): .venv/.ready
	mkdir -p $@
	for p in $(PACKAGES); do ln -sfn ../../../$$p $@/$$p; done

demo: setup
	.venv/bin/forebay demo

# For the tests of the dashboard, which are left out where it cannot be had.
browser:
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium) \
		|| echo 'no chromium: the dashboard is not tested in a browser'

# Each test has ports and folders of its own, each worker an S3 server.
test: setup browser
	$(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not alone"
	$(PY) -m pytest -m alone

lint: setup types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	PYTHONPATH=build/view .venv/bin/lint-imports --no-cache

types: setup $(VIEW)
	cd build/view && ../../.venv/bin/mypy --config-file ../../pyproject.toml -p forebay

# litdata without what it names: a torchvision for another build of torch would break lightning.
bench: setup
	$(PY) -m pip install --quiet --constraint constraints.txt tifffile
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps litdata
	for b in $(BENCHES); do .venv/bin/forebay bench $$b --json docs/figures/$$b.json || exit 1; done
	.venv/bin/forebay bench figures $(BENCHES:%=docs/figures/%.json)

faults: setup
	$(PY) -m pytest tests/faults

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info tiers/*.so
