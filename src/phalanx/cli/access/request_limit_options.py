"""The options that limit requests to services: of projects and of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from phalanx.cli.option_types import GrammarType
from phalanx.core.work.services.request_limits import parse_per_minute

_PER_MINUTE: Final = GrammarType("N", parse_per_minute)
C = TypeVar("C", bound=Callable[..., Any])


def request_limit_options(command: C) -> C:
    """Add the options to a command."""
    requests = click.option(
        "--requests-per-minute", type=_PER_MINUTE, help="Most requests to services through gateways: 600, or none."
    )
    tokens = click.option(
        "--tokens-per-minute", type=_PER_MINUTE, help="Most tokens of their prompts and answers: 200k, or none."
    )
    return requests(tokens(command))
