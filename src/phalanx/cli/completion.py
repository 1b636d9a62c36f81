"""`phalanx completion`: shell completion of commands, options, jobs and nodes; click makes the scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.connection import connect
from phalanx.cli.root import COMPLETE_VARIABLE

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from phalanx.client import Client

ANSWER_S: Final = 1.0  # a head that is not there must not hold up a key
JOBS_MAX: Final = 200
_WHERE: Final = {
    "bash": "~/.local/share/bash-completion/completions/phalanx",
    "zsh": "a folder of $fpath, as _phalanx",
    "fish": "~/.config/fish/completions/phalanx.fish",
}
_SHELLS: Final = tuple(_WHERE)


@click.command(epilog="\b\n" + "\n".join(f"{shell}: {place}" for shell, place in _WHERE.items()))
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the script that completes commands, options, jobs and nodes with the Tab key.

    \b
    eval "$(phalanx completion bash)"                   # in this shell
    phalanx completion fish > ~/.config/fish/completions/phalanx.fish
    """  # noqa: D301 - click reads the backspace character itself
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    print(found(context.find_root().command, {}, "phalanx", COMPLETE_VARIABLE).source())
    return 0


def complete_jobs(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The newest jobs whose id begins so, with name and state."""
    return _items(begun, lambda head: ((job.id, f"{job.name} ({job.state})") for job in head.jobs(limit=JOBS_MAX).jobs))


def complete_nodes(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The nodes whose name begins so, with their state."""
    return _items(begun, lambda head: ((node.id, str(node.state)) for node in head.nodes()))


def complete_services(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The services whose name begins so, with their state."""
    return _items(begun, lambda head: ((one.name, str(one.state)) for one in head.services()))


def _items(begun: str, ask: Callable[[Client], Iterable[tuple[str, str]]]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(word, help=about) for word, about in _answers(ask) if word.startswith(begun)]


def _answers(ask: Callable[[Client], Iterable[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    """What the head answers; nothing if it does not, because an error would be printed into the command line."""
    with contextlib.suppress(Exception), connect(retry_limit_s=0.0, answer_timeout_s=ANSWER_S) as head:
        yield from ask(head)


JOB_ARGUMENT: Final = click.argument("job", metavar="JOB", shell_complete=complete_jobs)
"""The argument of commands about one job."""
