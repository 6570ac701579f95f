FOLDERS := evals needles kernels runners results
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
export PYTHONPATH := $(CURDIR)/.ns
export PYTHONSAFEPATH := 1
PATCHSET ?= patchsets/reference.toml
PYTEST_ARGS ?= -n 2 --dist worksteal
PIP = $(VENV)/bin/pip install -q -c constraints.txt

.PHONY: install ns eval test check served serve report bench bench-h200-indexer trend clean train-indexer train-v32 v32 v32-agree v32-campaign v32-evidence v32-publish h200 sglang-cpu llamacpp

install: $(VENV)/installed ns
$(VENV)/installed: pyproject.toml constraints.txt
	python3.11 -m venv $(VENV)
	$(PIP) -e '.[dev,history]' || (sleep 10 && $(PIP) -e '.[dev,history]')  # what fails is most often a download
	touch $@

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

# On the GPU machine: both files of docs/benchmarks/indexer_h200 from one run, bench with the installed peers and GPU tests.
bench-h200-indexer: ns
	$(PYTHON) docs/benchmarks/indexer_h200.py $(BENCH_ARGS)

trend: install
	$(PYTHON) -m longrecall.results.main trend $(TREND_ARGS)

train-indexer: ns
	$(PYTHON) -m longrecall.runners.reference.train_indexer $(TRAIN_ARGS)

# On the GPU machine, with sglang 0.5.17 installed there: `make v32 PYTHON=python3`. Every step keeps what it has on disk: stopped
# at any moment (`timeout 540 make v32 …`), the same command goes on.
V32_STATE ?= results/runs/train-v32
V32_RUN ?= results/runs/sglang-v32
V32_MODEL = $(V32_STATE)/model
V32_OUT ?= results/published/sglang-v32
V32_RECIPE = patchsets/recipes/closed-world.toml
v32: train-v32 v32-agree v32-campaign v32-evidence v32-publish
train-v32: ns
	$(PYTHON) -m longrecall.runners.deepseek_v32.train --state $(V32_STATE) --export $(V32_MODEL) $(TRAIN_ARGS)
v32-agree: ns
	$(PYTHON) -m longrecall.runners.deepseek_v32.agree $(V32_MODEL) --recipe $(V32_RECIPE) --work $(V32_RUN)-agree --out $(V32_RUN)-agree/agreement.json $(AGREE_ARGS)
v32-campaign: ns
	$(PYTHON) -m longrecall.results.main eval patchsets/sglang-v32.toml --model-folder $(V32_MODEL) --recipe $(V32_RECIPE) --rungs 1024,1792,4096,8192 --conversations 32 --servers-per-gpu 12 --run-dir $(V32_RUN) $(EVAL_ARGS)
v32-evidence: ns
	$(PYTHON) -m longrecall.runners.deepseek_v32.evidence $(V32_MODEL) --recipe $(V32_RECIPE) --run $(V32_RUN) --out $(V32_RUN)-agree/evidence.json $(EVIDENCE_ARGS)
	$(PYTHON) -m longrecall.results.main report $(V32_RUN)
v32-publish: ns
	$(PYTHON) -m longrecall.runners.deepseek_v32.publish --model $(V32_MODEL) --log $(V32_STATE)/log.jsonl --run $(V32_RUN) --agreement $(V32_RUN)-agree/agreement.json --evidence $(V32_RUN)-agree/evidence.json --out $(V32_OUT)

SGLANG_VENV ?= .venv-sglang
sglang-cpu: install
	$(PYTHON) -m longrecall.runners.sglang_install $(SGLANG_VENV) $(SGLANG_ARGS)

llamacpp: install
	$(PIP) -e '.[llamacpp]' || (sleep 10 && $(PIP) -e '.[llamacpp]')

# Campaigns on SGLang and llama.cpp themselves, on the CPU.
served: sglang-cpu llamacpp
	LONGRECALL_SERVED=1 $(PYTHON) -m pytest -v --durations=0 -m "not gpu" tests/runners/test_sglang_cpu.py tests/runners/test_llamacpp.py

# On the GPU machine: `make h200 PYTHON=python3`, with sglang 0.5.17 installed there.
H200_OUT ?= results/runs/h200
H200 = $(PYTHON) -m longrecall.runners.h200 --base-diff patchsets/patches/sglang-h200-sane-dummy-weights.diff $(H200_ARGS)
h200: ns
	$(H200) patchsets/sglang-h200.toml --model deepseek-v32-tiny --dense-prefill-tokens 2048 --work $(H200_OUT)/v32 --out $(H200_OUT)/v32.json
	$(H200) patchsets/sglang-h200-v4.toml --model deepseek-v4-tiny --base-diff patchsets/patches/sglang-h200-v4-captured-selection.diff --work $(H200_OUT)/v4 --out $(H200_OUT)/v4.json

clean:
	rm -rf .venv .ns build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
