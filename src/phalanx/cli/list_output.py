"""Common parts of all lists: `--json`, `--watch`, and a last line with the next command."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import click

from phalanx.cli.terminal import Terminal, terminal

F = TypeVar("F", bound=Callable[..., Any])
INTERVAL_S: Final = 1.0  # of --watch; a list takes the head about a millisecond
_HOME_AND_CLEAR: Final = "\x1b[H\x1b[J"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListView:
    """One list, as text and as the value that `--json` prints."""

    value: object
    lines: Callable[[Terminal], Sequence[str]]
    next_command: str = ""
    notes: tuple[str, ...] = field(default=())


def list_options(command: F) -> F:
    """Add `--json` and `--watch`, as `as_json` and `watch`."""
    command = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
    return click.option("-w", "--watch", is_flag=True, help="Refresh every second until Ctrl-C.")(command)


def show_list(fetch: Callable[[], ListView], *, as_json: bool, watch: bool) -> None:
    """Fetch and print a list, once or repeatedly. `--json --watch` prints one document per line whenever it changes."""
    if not watch:
        _print(fetch(), as_json=as_json)
        return
    screen = terminal()
    try:
        if as_json or not screen.interactive:
            _repeat_plain(fetch, as_json=as_json)
        else:
            _repeat_on_screen(fetch)
    except KeyboardInterrupt:
        return


def to_json(value: object, *, indent: int) -> str:
    """Encode views as JSON text; `indent` 0 gives one line."""
    import msgspec

    raw = msgspec.json.encode(value)
    return msgspec.json.format(raw, indent=indent or -1).decode()


def _print(shown: ListView, *, as_json: bool) -> None:
    if as_json:
        print(to_json(shown.value, indent=2))
        return
    print("\n".join(_drawn(shown, terminal())))


def _drawn(shown: ListView, screen: Terminal) -> list[str]:
    tail = [screen.paint(f"next: {shown.next_command}", "dim")] if shown.next_command else []
    return [*shown.lines(screen), *shown.notes, *tail]


def _repeat_plain(fetch: Callable[[], ListView], *, as_json: bool) -> None:
    last = ""
    while True:
        shown = fetch()
        text = to_json(shown.value, indent=0) if as_json else "\n".join(_drawn(shown, terminal()))
        if text != last:
            print(text, flush=True)
            last = text
        time.sleep(INTERVAL_S)


def _repeat_on_screen(fetch: Callable[[], ListView]) -> None:
    sys.stdout.write("\x1b[?1049h\x1b[?25l")  # alternate screen, hidden cursor
    try:
        while True:
            shown = fetch()
            screen = terminal()
            lines = _drawn(shown, screen)
            if len(lines) > screen.height - 1:
                hidden = len(lines) - screen.height + 2
                lines = [*lines[: screen.height - 2], screen.paint(f"... {hidden} more lines", "dim")]
            sys.stdout.write(_HOME_AND_CLEAR + "\n".join(lines))
            sys.stdout.flush()
            time.sleep(INTERVAL_S)
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
