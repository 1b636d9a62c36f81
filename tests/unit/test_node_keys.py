"""Tokens of supervisors."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.access.node_tokens import node_of_token, node_token
from phalanx.core.ids import NodeId

SECRET = b"s" * 32


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40))
def test_token_speaks_for_its_node(name):
    assert node_of_token(SECRET, node_token(SECRET, NodeId(name))) == name


def test_token_of_another_head_or_node_speaks_for_nobody():
    assert node_of_token(b"t" * 32, node_token(SECRET, NodeId("n0"))) is None
    mac = node_token(SECRET, NodeId("n0")).rpartition(".")[2]
    assert node_of_token(SECRET, f"phxn.n1.{mac}") is None


@pytest.mark.parametrize(
    "token", ["", ".", "..", "phxn", "phxn.", "phxn..", "phxn.n0", "phxn.n0.", "phxn.n0.é", "x.n0.y", "phxn.n0.\udcff"]
)
def test_garbage_from_a_header_is_nobody_and_no_crash(token):
    assert node_of_token(SECRET, token) is None


@given(st.text(max_size=60))
def test_no_text_is_a_crash(text):
    assert node_of_token(SECRET, text) is None
    assert node_of_token(SECRET, "phxn.n0." + text) is None
