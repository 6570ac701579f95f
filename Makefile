FOLDERS := evals needles kernels runners results
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
export PYTHONPATH := $(CURDIR)/.ns
export PYTHONSAFEPATH := 1
PATCHSET ?= patchsets/reference.toml

.PHONY: install ns eval test check serve report bench trend clean train-indexer sglang-cpu

install: $(VENV)/installed ns
$(VENV)/installed: pyproject.toml constraints.txt
	python3.11 -m venv $(VENV) && $(VENV)/bin/pip install -q -c constraints.txt -e '.[dev,history]' && touch $@

ns: $(FOLDERS:%=.ns/longrecall/%)
.ns/longrecall/%: ; @mkdir -p .ns/longrecall && ln -sfn ../../$* $@

eval: install
	$(PYTHON) -m longrecall.results.main eval $(PATCHSET) $(if $(RUNGS),--rungs $(RUNGS)) $(if $(CONVERSATIONS),--conversations $(CONVERSATIONS)) $(EVAL_ARGS)

test: install
	$(PYTHON) -m pytest -q $(PYTEST_ARGS)

check: install
	$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check . && $(PYTHON) -m mypy $(FOLDERS:%=-p longrecall.%)

serve: install
	$(PYTHON) -m longrecall.results.main serve $(SERVE_ARGS)

report: install
	$(PYTHON) -m longrecall.results.main report $(RUN)

bench: install
	$(PYTHON) -m longrecall.results.main bench $(BENCH)

trend: install
	$(PYTHON) -m longrecall.results.main trend $(TREND_ARGS)

train-indexer: ns
	$(PYTHON) -m longrecall.runners.reference.train_indexer $(TRAIN_ARGS)

SGLANG_VENV ?= .venv-sglang
sglang-cpu: install
	$(PYTHON) -m longrecall.runners.sglang_install $(SGLANG_VENV) $(SGLANG_ARGS)

clean:
	rm -rf .venv .ns build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
