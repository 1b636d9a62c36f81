"""What the whole suite shares: how hard hypothesis tries, and the secrets that nobody may tell.

Builders of records live in ``tests/builders.py``; a fixture with side effects belongs beside the tests that need it.
"""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests import canaries

# One core may be busy with somebody else's build: a deadline per example would measure the machine, not the code.
settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=100,
    derandomize=True,  # the same commit gives the same verdict; new seeds are for `HYPOTHESIS_PROFILE=search`
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# A runner that starts the suite in the background hands on ignored signals (a shell's `&`, nohup), and every process under test
# would inherit them: Ctrl-C would mean nothing.
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(_number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.update(canaries.VARIABLES)
os.environ.setdefault(canaries.LEVEL, "DEBUG")
EYES = pytest.StashKey[canaries.Eyes]()


@pytest.fixture(scope="session", autouse=True)
def no_home_tells_a_secret(tmp_path_factory, request):
    with canaries.eyes_open(tmp_path_factory.getbasetemp()) as eyes:
        yield
    request.config.stash[EYES] = eyes
    assert eyes.found == []


def pytest_terminal_summary(terminalreporter, config):
    eyes = config.stash.get(EYES, None)
    if eyes is not None and eyes.homes:
        terminalreporter.write_line(f"canaries: {eyes}")
