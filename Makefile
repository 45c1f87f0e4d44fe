# `make demo` and `make test` are the two commands of the README; both set everything up.
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v))) python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.treespec-setup
V2 := .venv-v2
V2_STAMP := $(V2)/.treespec-setup
DOCS_STAMP := $(VENV)/.treespec-docs
PYTEST := $(BIN)/python -m pytest --numprocesses 2
THOROUGH ?= thorough
# Large pages: engines on a CPU read their weights faster (docs/deploy.md).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.PHONY: help setup setup-v2 assets demo test test-fast test-rest test-v2 test-all \
        deploy-check docs quality style

help:  ## print this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## virtual environment, locked packages, this project

$(STAMP): requirements/cpu.lock requirements/install.sh \
          requirements/vllm-cpu-shim/pyproject.toml setup.py
	@requirements/install.sh $(VENV) $(PYTHON)
	@touch $@

setup-v2: $(V2_STAMP)  ## another environment, for tests of vLLM's V2 model runner

$(V2_STAMP): requirements/v2.lock requirements/v2.sh $(STAMP)
	@requirements/v2.sh $(V2) $(VENV)
	@touch $@

assets: $(STAMP)  ## get the demo's target model, say where the models lie
	@$(BIN)/treespec assets

demo: $(STAMP)  ## generate with and without draft trees and print the table
	@$(BIN)/treespec demo

test: test-fast  ## fast tier, then one engine test of each kind
	@$(BIN)/treespec assets
	@echo "engine tier: real vLLM engines on the CPU, two at a time"
	@$(PYTEST) tests/engine -m "not thorough"

test-fast: $(STAMP)  ## fast tier only: no vLLM engine, no download after setup
	@echo "fast tier"
	@$(PYTEST) tests/fast -m "not thorough" --dist worksteal

test-rest: $(STAMP)  ## the thorough tests of both tiers, which make test leaves out
	@$(BIN)/treespec assets
	@$(PYTEST) tests/fast -m "$(THOROUGH)" --dist worksteal
	@$(PYTEST) tests/engine -m "$(THOROUGH)"

test-v2: $(V2_STAMP)  ## the GPU's V2 model runner on a CPU, Triton interpreted
	@echo "V2 tier"
	@$(V2)/bin/python -m pytest tests/v2 --numprocesses 2 --dist loadfile

test-all: test test-rest test-v2  ## all tests

deploy-check: $(STAMP)  ## charts, manifests, images, alerts; what needs a missing tool is skipped
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/deploy.txt
	@deploy/third_party.sh
	@$(PYTEST) tests/fast/test_deploy_*.py

docs: $(DOCS_STAMP)  ## documentation as a site in build/site; a dead link ends it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(DOCS_STAMP): requirements/docs.txt $(STAMP)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@

quality: $(STAMP) docs  ## ruff, mypy and the documentation, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: $(STAMP)  ## ruff, repairing what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
