"""The two outputs of the demo: the live view on a terminal, and plain log lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from phalanx.cli.demo.live_screen import plain_text, rate, render
from phalanx.cli.demo.state import DemoState
from phalanx.cli.keyboard import Keyboard
from phalanx.core.state.history import HistoryLine

_FRAME_S: Final = 0.2
_PROGRESS_EVERY_S: Final = 2.0
_GONE_KINDS: Final = ("node_down", "node_lost")
_COLUMNS_MIN, _ROWS_MIN = 60, 18  # a smaller terminal gets plain lines


class DemoView(Protocol):
    """An output of the demo; a context manager that restores the terminal on exit."""

    def __enter__(self) -> Self:
        """Start the output."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the output and restore the terminal."""

    def show(self, scene: DemoState) -> None:
        """Show the current state."""

    def show_event(self, line: HistoryLine, scene: DemoState) -> None:
        """Show a new event of the cluster."""

    def show_message(self, text: str, scene: DemoState) -> None:
        """Show a message of the demo itself."""

    def read_key(self) -> str:
        """Wait up to one frame for a key; return "" if none was pressed."""


class LiveDemoView:
    """The live view on the alternate screen, with keyboard input."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False, transient=True)
        self._keyboard = Keyboard()

    def __enter__(self) -> Self:
        self._keyboard.__enter__()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._keyboard.__exit__(kind, error, trace)

    def show(self, scene: DemoState) -> None:
        """Draw a frame."""
        scene.has_keyboard = self._keyboard.available
        lines = render(scene, width=self._console.width, height=self._console.height)
        self._live.update(Group(*(Text.assemble(line, no_wrap=True, overflow="crop") for line in lines)), refresh=True)

    def show_event(self, line: HistoryLine, scene: DemoState) -> None:
        """Do nothing: each frame already shows the events."""

    def show_message(self, text: str, scene: DemoState) -> None:
        """Show the text in the header."""
        scene.activity = text

    def read_key(self) -> str:
        """Wait up to one frame for a key; return "" if none was pressed."""
        return self._keyboard.read_key(_FRAME_S)


class PlainDemoView:
    """One line per event, and the training progress every two seconds."""

    def __init__(self) -> None:
        self._progress_s = 0.0
        self._step = -1
        self._when_s = 0.0  # time of the last line, since the demo started
        self._lost: set[tuple[str | None, float]] = set()  # (node, time) of each reported loss

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, scene: DemoState) -> None:
        """Print the progress if it has changed and the interval has passed."""
        if scene.now_s - self._progress_s < _PROGRESS_EVERY_S or scene.step == self._step:
            return
        self._progress_s, self._step = scene.now_s, scene.step
        if scene.step:
            self._print(progress_line(scene), scene)

    def show_event(self, line: HistoryLine, scene: DemoState) -> None:
        """Print the event with its own time. A node's loss arrives as two events (node and job) and is printed once."""
        if line.kind in _GONE_KINDS:
            if (line.node_id, line.at_s) in self._lost:
                return
            self._lost.add((line.node_id, line.at_s))
        self._print(plain_text(line.text), scene, at_s=line.at_s)

    def show_message(self, text: str, scene: DemoState) -> None:
        """Print the text."""
        self._print(text, scene)

    def read_key(self) -> str:
        """Wait one frame; there is no keyboard."""
        time.sleep(_FRAME_S)
        return ""

    def _print(self, text: str, scene: DemoState, *, at_s: float | None = None) -> None:
        # Events arrive slightly after the progress that they precede; printed times never decrease.
        self._when_s = max(self._when_s, (scene.now_s if at_s is None else at_s) - scene.started_s)
        sys.stdout.write(f"{self._when_s:6.1f} s  {text}\n")
        sys.stdout.flush()


def progress_line(scene: DemoState) -> str:
    """Return the training progress as one line."""
    words = [f"step {scene.step}/{scene.steps_total}"]
    progress = scene.progress
    if progress is not None and progress.loss is not None:
        words.append(f"loss {progress.loss:.3f}")
    if progress is not None and progress.tokens_per_s:
        words.append(f"{rate(progress.tokens_per_s)} tokens/s")
    busy = [
        f"{node.id}:"
        + "/".join(
            "-" if each.utilization is None else f"{100 * each.utilization:.0f}%"
            for each in node.devices
            if each.job_id
        )
        for node in scene.nodes
        if any(each.job_id for each in node.devices)
    ]
    if busy:
        words.append("devices " + " ".join(busy))
    if scene.published_step is not None:
        words.append(f"checkpoint {scene.published_step}")
    return ", ".join(words)


def view_for(console: Console, *, plain: bool) -> DemoView:
    """Choose the live view if the terminal is large enough and supports block characters, else plain lines."""
    shows = console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    large = console.width >= _COLUMNS_MIN and console.height >= _ROWS_MIN
    return LiveDemoView(console) if shows and large and not plain else PlainDemoView()
