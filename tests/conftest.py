"""Settings of the whole suite: how hard hypothesis tries, which tests `make test` leaves to `make prove`, and the search for leaked secrets.

Builders of records live in ``tests/builders.py``; a fixture with side effects belongs beside the tests that need it.
"""

import gc
import os
import resource
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests import canaries, effort, shards

# One core may be busy with another build: a deadline per example would measure the machine, not the code.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
# Quick: the same commit gives the same verdict. Full and search draw fresh examples.
settings.register_profile(
    "quick",
    deadline=None,
    max_examples=effort.QUICK_EXAMPLES,
    derandomize=True,
    database=None,
    suppress_health_check=_SLOW,
)
settings.register_profile("full", deadline=None, max_examples=200, print_blob=True, suppress_health_check=_SLOW)
settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full" if effort.FULL else "quick"))

# A shell that starts the suite in the background (`&`, nohup) passes on ignored signals, and every process under test
# would inherit them: Ctrl-C would have no effect.
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(_number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.update(canaries.VARIABLES)
os.environ.setdefault(canaries.LEVEL, "DEBUG")
SCANNER = pytest.StashKey[canaries.SecretLeakScanner]()
LEAKS = "leaks"  # under this key a worker of xdist sends what its scanner found


def pytest_addoption(parser):
    parser.addoption("--shard", type=int, default=0, help="run one shard of tests/shards.py, counted from 1")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(config, items):
    left_out = shards.left_out([item.nodeid for item in items])
    for item in items:
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.prove)
    number = config.getoption("shard")
    if number:
        chosen = set(shards.chosen_by(shards.SHARDS[number - 1], [item.nodeid for item in items]))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish():
    # The tests and their modules live to the end. Scanning them in every full collection took a quarter of the quick tests' CPU time.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_home_tells_a_secret(tmp_path_factory, request):
    with canaries.leak_scanner(tmp_path_factory.getbasetemp()) as scanner:
        yield
    request.config.stash[SCANNER] = scanner
    if hasattr(request.config, "workeroutput"):
        request.config.workeroutput[LEAKS] = str(scanner) if scanner.homes else ""
    assert scanner.found == []


class _Leaks:
    """Collects on the controller of xdist what the scanners of its workers found."""

    def __init__(self):
        self.lines = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.lines.append(getattr(node, "workeroutput", {}).get(LEAKS, ""))


def pytest_configure(config):
    config.pluginmanager.register(_Leaks(), "leaks")


def pytest_terminal_summary(terminalreporter, config):
    scanner = config.stash.get(SCANNER, None)
    lines = [
        str(scanner) if scanner is not None and scanner.homes else "",
        *config.pluginmanager.get_plugin("leaks").lines,
    ]
    for line in filter(None, lines):
        terminalreporter.write_line(f"canaries: {line}")
    if not hasattr(config, "workerinput"):
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        total_s = sum(one.ru_utime + one.ru_stime for one in used)
        terminalreporter.write_line(f"CPU: {total_s:.0f} s in this process and those that it waited for")
