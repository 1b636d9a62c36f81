"""A head of its own for each test of the API, and somebody who calls it. A module that needs more overrides them."""

import pytest

from tests.contract.api_head import ApiHead


@pytest.fixture
def head(tmp_path):
    head = ApiHead(str(tmp_path))
    yield head
    head.close()


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call
