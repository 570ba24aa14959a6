# Everything happens inside this folder: packages go to .venv, caches beside it.
# It needs Linux, GNU make and Python 3.11.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The Python that makes .venv: the first of these that is version 3.11.
PYTHON ?= $(firstword $(foreach name,python3.11 python3,$(if $(filter 3.11,$(call version,$(name))),$(name))))
version = $(if $(1),$(shell $(1) -c "import sys; print('%d.%d' % sys.version_info[:2])" 2>/dev/null))

# Where PyTorch publishes its CPU builds: the package of that name on PyPI is the CUDA build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-cache-dir
export MPLCONFIGDIR := $(CURDIR)/$(VENV)/matplotlib
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/$(VENV)/inductor

.DEFAULT_GOAL := help
.PHONY: help install demo test lint sanitize

help:
	@echo "make install   Python environment with pinned packages in $(VENV), then recsys-basis doctor"
	@echo "make demo      made-up clicks, three optimizers, one table: 1 to 2 minutes on 2 cores"
	@echo "make test      the whole test suite"
	@echo "make lint      ruff and mypy"
	@echo "make sanitize  the C++ kernels' tests under the address and undefined-behaviour sanitizers"

install: $(INSTALLED)
	$(BIN)/python -m recsys_basis.doctor

demo: $(INSTALLED)
	$(BIN)/recsys-basis compare experiment=demo comparison=demo output_dir=runs/demo

# Two files of tests at a time. A core for each: many tests start ranks of their own. Threads that wait sleep: those of
# kernels on three threads would else burn the core that another needs.
test sanitize: export OMP_WAIT_POLICY := passive
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile

sanitize: $(INSTALLED)
	scripts/sanitize.sh

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# The locks name every package, so pip resolves nothing (--no-deps): torchrec's metadata would draw in CUDA.
# pip writes INSTALLER last. A package without it was broken off, yet pip would take it for whole: forget it.
# Without a C++ compiler the last step installs plain PyTorch alone, and the kernels' tests skip, saying so.
$(INSTALLED): requirements/cpu.lock requirements/dev.lock pyproject.toml CMakeLists.txt $(wildcard recsys_basis/kernels/cpp/*)
	@test "$(call version,$(PYTHON))" = 3.11 || { \
		echo "No Python 3.11 found as $(or $(PYTHON),python3.11 or python3)."; \
		echo "Install it, or say where it is: make install PYTHON=/path/to/python3.11"; exit 1; }
	@test ! -d $(VENV)/lib || find $(VENV)/lib -name '*.dist-info' ! -exec test -e {}/INSTALLER \; -prune -exec rm -r {} +
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
		echo "Python could not make $(VENV). On Debian and Ubuntu: apt install python3.11-venv"; exit 1; }
	@$(BIN)/python -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))" || { \
		echo "$(VENV) holds another Python than 3.11. Remove it, then run make install again."; exit 1; }
	$(PIP) install --no-deps --retries 0 --timeout 10 --extra-index-url $(TORCH_INDEX) \
		"$$(grep '^torch==' requirements/cpu.lock)" || { \
		echo "PyTorch's CPU build did not come. Is $(TORCH_INDEX) in reach? Run make install again, or name"; \
		echo "a mirror: make install TORCH_INDEX=URL, or a folder with the wheel: PIP_FIND_LINKS=FOLDER"; exit 1; }
	$(PIP) install --no-deps -r requirements/cpu.lock -r requirements/dev.lock
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c "import torch, fbgemm_gpu, torchrec" || { \
		echo "The packages are installed but do not load. $(BIN)/recsys-basis doctor says why;"; \
		echo "to begin anew, remove $(VENV) and run make install again."; exit 1; }
	@touch $@
