"""A head of its own for each test of the API, and a caller on a fleet of one node."""

import pytest

from tests.contract.api_head import ApiHead, Supervisor


@pytest.fixture
def head(tmp_path):
    head = ApiHead(str(tmp_path))
    yield head
    head.close()


@pytest.fixture
def call(head):
    with head.calling() as call:
        Supervisor(call).hello()
        yield call
