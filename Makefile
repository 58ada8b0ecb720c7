# From nothing but python3, make and a C++ compiler to a trained decoder and a tested library.
# `make help` lists the targets.
#
# Set-up goes into $(VENV), once; a file there stands for each finished step.  setup.py builds the
# library and knows itself what has changed.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= $(shell grep '^torch' requirements-torch.txt)
RUN    ?= runs/demo
TRAIN  ?=
FUZZ   ?= 3000

py     := $(VENV)/bin/python
pip    := $(py) -m pip install --disable-pip-version-check
# One process per core: a test that wants more threads asks for them.
pytest := OMP_NUM_THREADS=1 $(py) -m pytest -n auto
cmake  := build/cmake
cpp    := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp tests/csrc/*.h tests/csrc/*.cpp)
run    := $(if $(findstring /,$(RUN)),$(RUN),./$(RUN))
say    := @printf '==> %s\n'
stop   := sh -c 'printf "make: %s\n" "$$1" >&2; exit 1' stop

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all build lint types ctest parity fuzz clean FORCE

help:  ## list the targets and variables
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo
	@echo "PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH=$(TORCH)"
	@echo "RUN=$(RUN) is the demo's folder, TRAIN what is added to its train command (TRAIN='--data book.txt')"
	@echo "also: CXX (the compiler), MAX_JOBS (files compiled at a time), and pip's own PIP_... variables"

# ---- set-up ----------------------------------------------------------------------------------------

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || $(stop) \
	  "there is no $(PYTHON) here: install Python 3.10 or newer, or name one with PYTHON=..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || $(stop) \
	  "$(PYTHON) is $$($(PYTHON) -V), but 3.10 or newer is needed: name one with PYTHON=..."
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(stop) \
	  "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv)."
	@for name in $${CXX:-c++ g++ clang++}; do command -v $$name && break; done >/dev/null || $(stop) \
	  "there is no C++ compiler here: install one (Debian, Ubuntu: apt install g++), or name it in CXX."
	$(say) "creating $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Holds the requirement that it was installed for; rewritten only when that changes.
$(VENV)/.torch: $(VENV)/.created FORCE
	@test "$$($(PYTHON) -V)" = "$$($(py) -V)" || $(stop) \
	  "$(VENV) holds $$($(py) -V), but PYTHON=$(PYTHON) is $$($(PYTHON) -V): remove $(VENV), or name another with VENV=..."
	@echo '$(TORCH)' | cmp -s - $@ || { \
	  printf '==> %s\n' "installing $(TORCH) into $(VENV)" && \
	  $(pip) 'setuptools>=77' '$(TORCH)' && echo '$(TORCH)' > $@; \
	} || $(stop) "could not install $(TORCH): pip's reason stands above (without a network, nothing can be downloaded)."

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py requirements-dev.txt
	$(say) "building the library"
	@$(py) setup.py -q build_ext --inplace
	$(say) "installing attention_ext[decoder,test] into $(VENV)"
	@$(pip) -q -c requirements-dev.txt --no-build-isolation -e '.[decoder,test]' || $(stop) \
	  "could not install attention_ext[decoder,test]: pip's reason stands above (without a network, nothing can be downloaded)."
	@touch $@

build: $(VENV)/.installed  ## set up and build attention_ext/_C.so; compiles what has changed
	@$(py) setup.py -q build_ext --inplace

# ---- checks ----------------------------------------------------------------------------------------

lint: $(VENV)/.installed  ## ruff and clang-format
	$(say) "ruff"
	@$(py) -m ruff check .
	@$(py) -m ruff format --check .
	$(say) "clang-format"
	@$(VENV)/bin/clang-format --dry-run --Werror $(cpp)

types: $(VENV)/.installed  ## mypy --strict
	$(say) "mypy"
	@$(py) -m mypy

ctest: $(VENV)/.installed  ## the C++ tests, built by CMake
	$(say) "C++ tests"
	@command -v cmake >/dev/null || test -x $(VENV)/bin/cmake || $(pip) -q 'cmake>=3.20' || $(stop) \
	  "there is no cmake here and pip could not install it: its reason stands above."
	@mkdir -p build; PATH="$$PATH:$(abspath $(VENV))/bin"; \
	  cmake -S . -B $(cmake) -DPython_EXECUTABLE=$(abspath $(py)) -Wno-dev > $(cmake).log || { cat $(cmake).log; exit 1; }; \
	  MAKEFLAGS= cmake --build $(cmake) --parallel $$(nproc) && ctest --test-dir $(cmake) --output-on-failure

# On every instruction set of this machine below the best: $(1) says what, $(2) chooses the tests.
# The choice is made when the library loads, hence a process for each.
define on_lower_sets
	@best=$$($(py) -c 'import attention_ext; print(attention_ext.build_info()["cpu_capability"])') || exit 1; \
	for isa in baseline avx2 avx512; do \
	  test $$isa != $$best || break; \
	  printf '==> %s\n' "$(1) on $$isa"; \
	  ATTENTION_EXT_CPU_CAPABILITY=$$isa $(pytest) $(2) || exit 1; \
	done
endef

parity: build  ## the parity tests, on every instruction set of this machine below the best
	$(call on_lower_sets,parity tests,-m parity)

test: lint types ctest parity  ## every lint, type check and test but the slow ones
	$(say) "tests"
	@$(pytest)

test-all: test  ## the same, the slow tests, and all tests on every instruction set
	$(call on_lower_sets,tests,)
	$(say) "slow tests"
	@$(pytest) -m slow

fuzz: build  ## thousands of random calls, gradients and second derivatives against the definition (FUZZ=3000 each)
	$(say) "random calls"
	@FUZZ_EXAMPLES=$(FUZZ) $(pytest) tests/test_fuzz.py

# ---- demo ------------------------------------------------------------------------------------------

# Stands for a training that came to its end; one that was stopped goes on.
$(RUN)/.trained: | build
	$(say) "training a decoder in $(RUN)"
	@if test -f $(RUN)/train_state.safetensors; then set -- --resume; else set --; fi; \
	  $(py) -m attention_ext train $(run) "$$@" $(TRAIN)
	@touch $@

demo: $(RUN)/.trained build  ## train the default decoder in $(RUN), unless that is done, and write text with it
	$(say) "writing text with the decoder in $(RUN); to train again, remove that folder"
	@$(py) -m attention_ext generate $(run) --prompt 'A function is ' --stats
	$(say) "more: $(py) -m attention_ext generate $(run) --help"

clean:  ## remove what was built; $(VENV) and runs stay
	rm -rf build dist *.egg-info attention_ext/_C.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
