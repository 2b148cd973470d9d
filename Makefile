PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test lab docs serve kernels readme export clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

install: .venv/.installed-test  ## create .venv with everything for development

# Each set of packages has its stamp, so that a larger set only adds to a smaller one. The files under requirements/
# are complete and exact: pip resolves nothing. Its second step adds what only this system or Python needs, and the
# NVIDIA packages of a CUDA build of torch.
extras-lab := [lab]
extras-docs := [docs]
extras-test := [dev,docs,trackers]
within-lab := demo
within-docs := demo
within-test := demo lab docs

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed-%: requirements/%.txt pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --no-deps -r $<
	$(BIN)/python -m pip install --no-build-isolation -c constraints.txt -e ".$(extras-$*)"
	@if [ $* = demo ]; then $(BIN)/dendritic-lab data fetch; fi  # what demo reads, so that it needs no network
	@if [ $* = test ] && [ -d .git ]; then $(BIN)/nbdev_install_hooks && printf '#!/bin/sh\nexec .venv/bin/nbdev_trust\n' > .git/hooks/post-merge; fi
	@touch $(foreach set,$* $(within-$*),.venv/.installed-$(set))

demo: .venv/.installed-demo  ## a short run for each of the five systems, minutes in all, and a page with what came of it
	$(BIN)/dendritic-lab demo

test: install  ## ruff, every notebook, every test, and a build of the site
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2 --dist loadgroup --maxschedchunk 1 --durations 25

lab: .venv/.installed-lab  ## open JupyterLab on its launcher notebook
	$(BIN)/jupyter lab --notebook-dir=nbs nbs/launcher.ipynb

docs: .venv/.installed-docs  ## build the site into _site, with quarto or else smalldocs; the first time runs the tutorials
	@if command -v quarto >/dev/null; then echo "building with quarto"; quarto render; \
	else echo "building with smalldocs (quarto is not on the PATH)"; $(BIN)/smalldocs render; fi

serve: docs  ## build the site and serve it on this machine, port 8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory _site 8000

kernels: .venv/.installed-demo  ## build the C++ extension of the attention kernels ahead of its first use
	$(BIN)/python -m dendritic_kernels

readme: .venv/.installed-demo  ## write the tables of the READMEs from outputs/reference
	$(BIN)/dendritic-lab stage --readme

export: install  ## clean the notebooks and write the library from them
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export

clean:  ## remove .venv, the built site and caches; runs under outputs/ stay
	rm -rf .venv _site docs .tutorials .pytest_cache .ruff_cache *.egg-info
