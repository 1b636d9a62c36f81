"""Who watches: a person at a terminal with the live view, or a log that gets plain lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from phalanx.cli.demo.keyboard import Keyboard
from phalanx.cli.demo.scene import Scene
from phalanx.cli.demo.screen import compose, plain_text, rate
from phalanx.core.state.story import StoryLine

_FRAME_S: Final = 0.2
_PROGRESS_EVERY_S: Final = 2.0
_GONE_KINDS: Final = ("node_down", "node_lost")
_LEAST_COLUMNS, _LEAST_ROWS = 60, 18  # below it the live view shows too little


class Audience(Protocol):
    """One that watches."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; the terminal is as before."""

    def show(self, scene: Scene) -> None:
        """The scene as it is now."""

    def tell(self, line: StoryLine, scene: Scene) -> None:
        """A new line of the story."""

    def say(self, text: str, scene: Scene) -> None:
        """Something of the demo's own."""

    def key(self) -> str:
        """A key, or nothing after a moment."""


class LiveAudience:
    """The live view on the alternate screen, and the keyboard."""

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

    def show(self, scene: Scene) -> None:
        """Draw a frame."""
        scene.keys = self._keyboard.works
        lines = compose(scene, width=self._console.width, height=self._console.height)
        self._live.update(Group(*(Text.assemble(line, no_wrap=True, overflow="crop") for line in lines)), refresh=True)

    def tell(self, line: StoryLine, scene: Scene) -> None:
        """The frame shows the story."""

    def say(self, text: str, scene: Scene) -> None:
        """Shown in the header."""
        scene.stage = text

    def key(self) -> str:
        """A key, or nothing until the next frame."""
        return self._keyboard.key(_FRAME_S)


class PlainAudience:
    """One line for each event, and every two seconds how far training is."""

    def __init__(self) -> None:
        self._progress_s = 0.0
        self._step = -1
        self._when_s = 0.0  # of the last line, since the demo began
        self._gone: set[tuple[str | None, float]] = set()  # (node, moment) of each loss told

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, scene: Scene) -> None:
        """Print progress when it is time and there is some."""
        if scene.now_s - self._progress_s < _PROGRESS_EVERY_S or scene.step == self._step:
            return
        self._progress_s, self._step = scene.now_s, scene.step
        if scene.step:
            self._print(progress_line(scene), scene)

    def tell(self, line: StoryLine, scene: Scene) -> None:
        """Print it under its own time. A node's loss is told twice, of the node and of its job, and printed once."""
        if line.kind in _GONE_KINDS:
            if (line.node_id, line.at_s) in self._gone:
                return
            self._gone.add((line.node_id, line.at_s))
        self._print(plain_text(line.text), scene, at_s=line.at_s)

    def say(self, text: str, scene: Scene) -> None:
        """Print it."""
        self._print(text, scene)

    def key(self) -> str:
        """Nobody is there; waits as long as a frame."""
        time.sleep(_FRAME_S)
        return ""

    def _print(self, text: str, scene: Scene, *, at_s: float | None = None) -> None:
        # The story arrives a moment after progress was printed: what is read from top to bottom never goes back in time.
        self._when_s = max(self._when_s, (scene.now_s if at_s is None else at_s) - scene.started_s)
        sys.stdout.write(f"{self._when_s:6.1f} s  {text}\n")
        sys.stdout.flush()


def progress_line(scene: Scene) -> str:
    """How far training is, in one line."""
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


def audience_for(console: Console, *, plain: bool) -> Audience:
    """The live view where it can be drawn: a terminal of some size that knows block characters."""
    shows = console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    large = console.width >= _LEAST_COLUMNS and console.height >= _LEAST_ROWS
    return LiveAudience(console) if shows and large and not plain else PlainAudience()
