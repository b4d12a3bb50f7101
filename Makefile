# make demo: train a GPT on 8 local processes.  make test, make lint, make bench.
# Each makes .venv on a fresh machine.  TORCH chooses the build: make test TORCH=torch==2.11.0
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo test lint bench clean

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	touch $@

$(VENV)/%.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[$*]"
	touch $@

demo: $(VENV)/bench.stamp
	$(PY) -m examples.train_gpt $(ARGS)

test: $(VENV)/test.stamp $(VENV)/bench.stamp
	$(PY) -m pytest $(ARGS)

lint: $(VENV)/dev.stamp $(VENV)/bench.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)

bench: $(VENV)/bench.stamp
	$(PY) -m benchmarks.overhead
	$(PY) -m benchmarks.matmul

clean:
	rm -rf $(VENV) out
