"""The options of `phalanx plan --serve`, and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from phalanx.cli.terminal import terminal
from phalanx.plans.option_words import flag_of

_ROLLOUT = ("prompt_tokens", "answer_tokens")
F = TypeVar("F", bound=Callable[..., Any])
_SERVE_ONLY = ("users", *_ROLLOUT, "ttft", "tpot", "think")


def serving_options(command: F) -> F:
    """Add the options of `--serve` to the command."""
    for option in reversed(
        (
            click.option("--serve", is_flag=True, help="Plan inference: how many GPUs answer --users in time."),
            click.option("--users", metavar="N", help="With --serve: requests at the same time."),
            click.option(
                "--in",
                "prompt_tokens",
                metavar="N",
                help="With --serve or --method grpo: mean tokens of a prompt. [default: 1000; with grpo an eighth of --seq]",
            ),
            click.option(
                "--out",
                "answer_tokens",
                metavar="N",
                help="With --serve or --method grpo: mean tokens of an answer. [default: 300; with grpo half of the longest]",
            ),
            click.option(
                "--ttft",
                metavar="TIME",
                help="With --serve: first token within 500ms for 95 % of requests. [default: 1s]",
            ),
            click.option(
                "--tpot", metavar="TIME", help="With --serve: time per output token, 50ms for 95 % of requests."
            ),
            click.option(
                "--think", metavar="TIME", help="With --serve: mean pause of a user after an answer. [default: none]"
            ),
        )
    ):
        command = option(command)
    return command


def refuse_without_serve(options: Mapping[str, Any]) -> None:
    """Refuse the options of `--serve` without it.

    Raises:
        BadRequest: one was given.
    """
    from phalanx.core.errors import BadRequest

    writes = str(options["method"]).startswith("grpo")
    for name in _SERVE_ONLY:
        if options[name] is not None and not (writes and name in _ROLLOUT):
            raise BadRequest(f"--{flag_of(name)} needs --serve", hint="phalanx plan MODEL --serve --users 200")


def print_serving_plan(options: Mapping[str, Any]) -> int:
    """Plan inference and print the answer; return the exit code."""
    from phalanx.cli.cluster.state_folder import home_folder
    from phalanx.cli.list_output import to_json
    from phalanx.cli.plan.serving_page import serving_page
    from phalanx.plans.serving.answer import compute_serving_plan
    from phalanx.plans.serving.records import serving_as_json

    answer = compute_serving_plan(options, home=home_folder(), fleet=_fleet)
    text = to_json(serving_as_json(answer), indent=2) if options["as_json"] or options["save_path"] else ""
    if options["save_path"]:
        Path(options["save_path"]).write_text(text + "\n", encoding="utf-8")
    print(text if options["as_json"] else "\n".join(serving_page(answer, terminal(), explain=options["explain"])))
    return 0 if answer.fits else 1


def _fleet() -> Any:
    from phalanx.cli.connection import connect

    return connect()
