"""A head of its own for each test of the API, and somebody who calls it. A module that needs more overrides them.

All tests of this folder run at debug level, and none may log a secret: every token that is made or used anywhere here is a canary.
"""

import logging
import secrets

import pytest

from phalanx.store.sql.backups import DatabaseLocation
from tests import postgres_here
from tests.contract.api_head import SECRET, TOKENS, ApiHead

TOKEN_BYTES = 32
CALLERS = ("httpx", "httpcore")  # the tests' own: they tell what a test asks, which may be a token where none belongs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make test` runs the contract of engines on the local one; `make test-engines` and `make prove` run it on Slurm and Ray."""
    for item in items:
        if "on_slurm" in item.name or "on_ray" in item.name:
            item.add_marker(pytest.mark.prove)


class Canaries(logging.Handler):
    """Hears every record of every logger, and keeps those with a secret in them."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter())
        self.known = {*TOKENS.values(), SECRET.decode(), SECRET.hex()}
        self.sung = []

    def emit(self, record):
        text = self.format(record)
        known = tuple(self.known)  # at once: another thread may be making a token
        if record.name.partition(".")[0] not in CALLERS and any(canary in text for canary in known):
            self.sung.append(f"{record.name}: {text}")

    def made(self, size=None):
        """As `secrets.token_urlsafe`, of which every token comes; shorter words are names, that open nothing by themselves."""
        made = _TOKEN_URLSAFE(size)
        if size == TOKEN_BYTES:
            self.known.add(made)
        return made


_TOKEN_URLSAFE = secrets.token_urlsafe


@pytest.fixture(scope="session")
def canaries():
    canaries = Canaries()
    root = logging.getLogger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_urlsafe", canaries.made)
        level = root.level
        root.setLevel(logging.DEBUG)
        logging.getLogger("hypothesis").setLevel(logging.WARNING)
        root.addHandler(canaries)
        yield canaries
        root.removeHandler(canaries)
        root.setLevel(level)


@pytest.fixture(autouse=True)
def no_secret_is_logged(canaries):
    canaries.sung.clear()
    yield
    assert canaries.sung == []


@pytest.fixture
def head(tmp_path):
    head = ApiHead(str(tmp_path))
    yield head
    head.close()


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call


@pytest.fixture
def places(tmp_path):
    """Makes places of a kind; databases are dropped afterwards."""
    made: list[str] = []

    def make(kind, *, ready=True):
        if kind == "sqlite":
            folder = tmp_path / f"db{len(made)}"
            made.append("")
            return DatabaseLocation(path=str(folder / "phalanx.db"))
        if why := postgres_here.why_not():
            pytest.skip(why)
        made.append(postgres_here.server().fresh() if ready else postgres_here.server().empty())
        return DatabaseLocation(dsn=made[-1])

    yield make
    for dsn in filter(None, made):
        postgres_here.server().drop(dsn)
