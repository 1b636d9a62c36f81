"""Queries that are read past FastAPI's parsing have the values that FastAPI finds; all others are left to it."""

from typing import Annotated

import hypothesis.strategies as st
from fastapi import Query
from fastapi.dependencies.utils import get_dependant, request_params_to_args
from hypothesis import given
from starlette.datastructures import QueryParams
from starlette.requests import Request

from phalanx.api.http.direct_routes import plain_arguments, query_parameters
from phalanx.api.http.routing import NonNegative, OptionalNonNegative


async def handler(
    request: Request,
    after: NonNegative = 0,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
    head: str = "",
    packed: bool = False,
) -> None:
    """Take what a hot route takes."""


async def with_header(request: Request, name: Annotated[str, Query(alias="other")] = "") -> None:
    """Take a parameter of another name."""


async def optional(request: Request, limit: OptionalNonNegative = None) -> None:
    """Take a number or nothing."""


async def required(request: Request, name: str) -> None:
    """Take what must be given."""


VALUES = st.one_of(
    st.integers(-3, 1 << 54).map(str),
    st.floats(allow_nan=True).map(repr),
    st.sampled_from(
        ("", "1_0", "007", "+1", " 1", "%31", "1e3", "20.50", ".5", "true", "True", "1", "on", "\u0663", "a+b", "inf")
    ),
    st.text("abc.-~_%&=+019", max_size=6),
)
QUERIES = st.lists(
    st.tuples(st.sampled_from(("after", "wait_s", "head", "packed", "other", "")), VALUES).map("=".join), max_size=4
).map("&".join)


@given(QUERIES)
def test_a_plain_query_has_the_values_that_fastapi_finds(query):
    parameters = query_parameters(handler)
    assert parameters is not None
    found = plain_arguments(query.encode("latin-1", "ignore"), parameters)
    if found is not None:
        known = get_dependant(path="/", call=handler).query_params
        values, errors = request_params_to_args(known, QueryParams(query.encode("latin-1", "ignore")))
        assert not errors
        assert {"after": 0, "wait_s": 0.0, "head": "", "packed": False} | found == values


def test_what_supervisors_ask_is_read_directly():
    parameters = query_parameters(handler)
    assert parameters is not None
    asked = b"after=17&wait_s=20.0&head=0c8f&packed=true"
    assert plain_arguments(asked, parameters) == {"after": 17, "wait_s": 20.0, "head": "0c8f", "packed": True}


def test_handlers_with_other_parameters_are_left_to_fastapi():
    assert [query_parameters(one) for one in (with_header, optional, required)] == [None, None, None]
