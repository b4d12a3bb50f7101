# make demo: train a GPT on 8 local processes.  make test, make lint, make bench; nightly: make fuzz,
# make operators, make fixes (runs the fix line of every error), make memcheck (no declaration lets a
# kernel read past a block), make kernels (cuda/ against fp64), make faults (ranks that part ways),
# make jobs (drawn trainings against dense), make histories (drawn acts between steps), make pipelines
# (every schedule and recipe in stages), make accelerator (the suite on a device that is not the CPU).
# Each makes .venv on a fresh machine.  TORCH chooses the build: make test TORCH=torch==2.11.0
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile

# Of torch's 5,000 files a tenth is imported: each is compiled at its first import, into .venv, also
# where the environment forbids Python to write beside its sources.
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
unexport PYTHONDONTWRITEBYTECODE

.PHONY: accelerator copies histories pipelines demo test fuzz fixes kills targets operators memcheck kernels faults raising jobs lint bench gpu docs notebooks clean
.NOTPARALLEL: # one pip at a time

# torch first and alone: the second install then finds it there and brings no other build.
ifneq ($(TORCH),$(shell cat $(VENV)/torch.stamp 2>/dev/null))
.PHONY: $(VENV)/torch.stamp
endif
$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	echo "$(TORCH)" > $@

$(VENV)/%.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) -e ".[$*]"
	touch $@

demo: $(VENV)/demo.stamp
	$(PY) -m examples.train_gpt $(ARGS)

test: $(VENV)/test.stamp
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

fuzz: $(VENV)/test.stamp
	$(PY) -m tests.fuzz_calls --count 50000 $(ARGS)

# What was done before a step changes none of its results, drawn.
histories: $(VENV)/test.stamp
	$(PY) -W ignore -m tests.histories --count 500 $(ARGS)
	$(PY) -W ignore -m tests.histories --count 60 --real $(ARGS)

fixes: $(VENV)/test.stamp
	$(PY) -m pytest --fixes $(ARGS)

# kill -9 at drawn moments of a save: nothing lost, nothing mixed, nobody told wrong, nothing left over.
kills: $(VENV)/test.stamp
	$(PY) -m tests.checkpoint.kill --count 60 $(ARGS)
	$(PY) -m tests.tiers.kill --count 60
	$(PY) -m tests.tiers.kill_steps --count 60

# Whatever may stand where something is written: nothing of it is lost.
targets: $(VENV)/test.stamp
	$(PY) -m tests.checkpoint.targets --count 200 $(ARGS)

# Copies of sharded models against the same copies of plain ones, drawn.
copies: $(VENV)/test.stamp
	$(PY) -m tests.copies --count 500 $(ARGS)

operators: $(VENV)/test.stamp
	$(PY) -m tests.database $(ARGS)
	$(PY) -m tests.collectives.block_database
	$(PY) -m tests.namespace
	$(PY) -W ignore -m tests.module_database

# Tensors against pages that may not be touched; wants gcc.  tests/memcheck.py says what it catches.
memcheck: $(VENV)/test.stamp
	$(PY) -m tests.memcheck $(ARGS)

# Every kernel of cuda/ compiled by g++ against torch in fp64, 1,000 drawn inputs each.
kernels: $(VENV)/test.stamp
	$(PY) -m tests.kernels.properties $(ARGS)

# Ranks that part ways, on real processes: what the others say, and how soon.
faults: $(VENV)/test.stamp
	$(PY) -m tests.faults $(ARGS)

# Exceptions in the middle of algorithms, caught by all ranks: nothing stays posted, the next step is right.
raising: $(VENV)/test.stamp
	$(PY) -m tests.collectives.raising $(ARGS)

# Whole trainings, drawn: stages, meshes, groups, ties; parameters, states and files equal dense's.
jobs: $(VENV)/test.stamp
	$(PY) -m tests.optim.jobs $(ARGS)

# Pipelines: drawn modules and cuts, all schedules x recipes on 4 and 8 processes, the zoo at pipe=2, 4, 8.
pipelines: $(VENV)/test.stamp
	$(PY) -m tests.pipeline.drawn --count 500 --split $(ARGS)
	$(PY) -m tests.pipeline.grid
	$(PY) -m tests.pipeline.grid --zoo --tolerance 1e-5
	$(PY) -m tests.pipeline.grid --deep

# The suite on a pretend accelerator, simulated and real ranks; wants g++.  Then 500 drawn calls against
# the CPU's bits, and tensors without a device, planted, that it must find.
accelerator: $(VENV)/test.stamp
	$(PY) -m tests.accelerator.suite --all $(ARGS)
	$(PY) -W ignore -m tests.accelerator.alike --count 500
	$(PY) -m tests.accelerator.suite --planted

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)

# Every benchmark once, few repetitions, within ten minutes; benchmarks/all.py names the parts.
bench: $(VENV)/bench.stamp
	$(PY) -m benchmarks.all $(ARGS)

# All that needs a GPU, within nine minutes, with the interpreter that has torch for it: nothing is
# installed.  benchmarks/gpu.py names the parts; its table is in out/gpu.md as it grows.
gpu:
	PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(PYTHON) -m benchmarks.gpu $(ARGS)

# The site, without a warning, into out/site.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(PY) -m mkdocs build --quiet $(ARGS)

# Runs every notebook from its start and writes its outputs into it.
notebooks: $(VENV)/notebooks.stamp
	$(PY) notebooks/run.py $(ARGS)

clean:
	rm -rf $(VENV) out
