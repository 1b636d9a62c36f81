"""The live screen of `phalanx top`. A thread polls the head once a second; the screen shows the newest reply."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Label, Static
from textual.worker import get_current_worker

from phalanx.cli.terminal import strip_control, truncate
from phalanx.cli.top.fleet_grid import count_letters, grid_lines, legend_lines
from phalanx.cli.top.fleet_view import FleetView
from phalanx.cli.top.log_view import show_log
from phalanx.cli.top.rendering import (
    fleet_text,
    headline,
    is_found,
    job_line,
    job_row,
    job_titles,
    shows_all,
)
from phalanx.core.errors import PhalanxError
from phalanx.core.ids import JobId
from phalanx.core.work.states import JobState
from phalanx.web.command_hints import error_line
from phalanx.wire.api.fleet import FleetFrame
from phalanx.wire.api.head import Overview
from phalanx.wire.api.jobs import JobView

if TYPE_CHECKING:
    from phalanx.client import Client

_INTERVAL_S: Final = 1.0
_ROWS_MIN: Final = 24  # of jobs, and as many as a higher screen has; a search finds others
_OTHER_LINES: Final = 9  # headline, footer, the chosen job, and at least five rows of jobs with their titles


class ConfirmDialog(ModalScreen[bool]):
    """Confirmation dialog for an action that cannot be undone."""

    CSS: ClassVar[str] = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: auto; max-width: 90%; height: auto; border: round $warning; padding: 1 2; background: $surface; }
    Confirm Label { width: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Create the question and its keys."""
        yield Vertical(Label(Text(self._question)), Label(Text("y: yes   n: no", style="dim")))

    def action_answer(self, answer: bool) -> None:
        """Close the dialog with the answer."""
        self.dismiss(answer)


class TopApp(App[None]):
    """The application: nodes above, jobs below, keys in the footer."""

    CSS: ClassVar[str] = """
    Screen { layout: vertical; }
    #headline { height: 1; padding: 0 1; background: $panel; }
    #legend { height: auto; padding: 0 1; }
    #grid { padding: 0 1; }
    #fleet { height: auto; max-height: 50%; padding: 0 1; }
    #search { height: 1; border: none; padding: 0 1; }
    #jobs { height: 1fr; }
    #chosen { height: 1; padding: 0 1; color: $text-muted; }
    #trouble { height: auto; padding: 0 1; color: $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit"),
        Binding("l,enter", "logs", "Log"),
        Binding("c", "cancel", "Cancel job"),
        Binding("a", "toggle_ended", "Ended jobs"),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("escape", "end_search", "All", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, head: Client, first: Overview, frame: FleetFrame) -> None:
        super().__init__()
        self._head = head
        self._overview, self._frame = first, frame
        self._wanted = ""
        self._jobs: list[JobView] = []
        self._rows: dict[JobId, list[Text]] = {}
        self._ended = True
        self._titles: list[str] = []

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        yield Static(id="headline")
        yield FleetView(id="legend")
        yield FleetView(id="grid")
        yield VerticalScroll(Static(id="fleet_lines"), id="fleet")
        yield DataTable(id="jobs", cursor_type="row", zebra_stripes=True)
        yield Static(id="chosen")
        yield Input(id="search", placeholder="a part of a name, user, number or node; Enter keeps it, Escape ends")
        yield Static(id="trouble")
        yield Footer()

    def on_mount(self) -> None:
        """Draw the first overview, then start polling."""
        self.query_one("#search").display = False
        self._layout_table()
        self._table().focus()
        self.run_worker(self._watch, thread=True, exclusive=True)

    def on_resize(self) -> None:
        """Lay out columns and devices again."""
        self._layout_table()

    def _layout_table(self) -> None:
        chosen = self._selected()
        table = self._table()
        table.clear(columns=True)
        self._rows = {}
        self._titles = job_titles(self.size.width)
        for title in self._titles:
            table.add_column(title, key=title)
        self.draw(self._overview, self._frame, chosen)

    # ---- polling ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            try:
                seen, frame = self._head.overview(), self._head.fleet()
            except PhalanxError as error:
                self.call_from_thread(self._show_error, error_line(error.message, error.hint))
            else:
                self.call_from_thread(self.draw, seen, frame)
            time.sleep(_INTERVAL_S)

    def _show_error(self, text: str) -> None:
        line = self.query_one("#trouble", Static)
        line.update(Text(strip_control(text)))
        line.display = bool(text)

    # ---- drawing ----------------------------------------------------------------------------------------------------

    def draw(self, seen: Overview, frame: FleetFrame, chosen: JobView | None = None) -> None:
        """Show what the head answered."""
        self._overview, self._frame = seen, frame
        self._show_error("")
        self.query_one("#headline", Static).update(headline(seen, frame, self.size.width - 2))
        self._draw_fleet(seen, frame)
        chosen = chosen or self._selected()
        listed = [*seen.running, *seen.pending, *(seen.recent if self._ended else [])]
        self._jobs = [job for job in listed if is_found(job, self._wanted)][: max(_ROWS_MIN, self.size.height)]
        self._fill_table({job.id: job_row(job, seen.now_s, self._titles) for job in self._jobs})
        table = self._table()
        place = next((place for place, job in enumerate(self._jobs) if chosen is not None and job.id == chosen.id), 0)
        if self._jobs:
            table.move_cursor(row=place)
        self._show_selected()

    def _fill_table(self, rows: dict[JobId, list[Text]]) -> None:
        """Show these rows. Cells that changed are replaced one by one, since the table measures each cell of a new row."""
        table = self._table()
        if list(rows) != list(self._rows) or len(table.columns) != len(self._titles) or table.row_count != len(rows):
            table.clear()
            for job_id, cells in rows.items():
                table.add_row(*cells, key=job_id)
        else:
            for at, (job_id, cells) in enumerate(rows.items()):
                for column, (cell, before) in enumerate(zip(cells, self._rows[job_id], strict=True)):
                    if cell != before:
                        table.update_cell_at(Coordinate(at, column), cell)
        self._rows = rows

    def _draw_fleet(self, seen: Overview, frame: FleetFrame) -> None:
        """Draw devices with bars if all of them fit into half of the screen, and a letter for each GPU otherwise."""
        width = max(1, self.size.width - 2)
        legend = legend_lines(count_letters(frame), width)
        self.query_one("#legend", FleetView).show(legend)
        detailed = self.query_one("#fleet", VerticalScroll)
        letters = dict(zip(frame.nodes, frame.cells, strict=True))
        text = fleet_text(seen.nodes, width - 2, seen.ordered, seen.now_s, letters) if shows_all(seen, frame) else None
        detailed.display = text is not None and text.plain.count("\n") < self.size.height // 2
        grid = self.query_one("#grid", FleetView)
        grid.display = not detailed.display
        if text is not None and detailed.display:
            self.query_one("#fleet_lines", Static).update(text)
        else:
            room = max(1, self.size.height - len(legend) - _OTHER_LINES)
            grid.show(grid_lines(frame, width, room, self._wanted))

    def _show_selected(self) -> None:
        job = self._selected()
        self.query_one("#chosen", Static).update(
            Text("" if job is None else truncate(job_line(job), self.size.width - 2))
        )

    def _table(self) -> DataTable[Text]:
        return self.query_one("#jobs", DataTable)

    def _selected(self) -> JobView | None:
        row = self._table().cursor_row
        return self._jobs[row] if 0 <= row < len(self._jobs) else None

    # ---- keys -------------------------------------------------------------------------------------------------------

    def on_data_table_row_highlighted(self) -> None:
        """Show the selected job in the line below the table."""
        self._show_selected()

    def on_data_table_row_selected(self) -> None:
        """Open the log of the job."""
        self.action_logs()

    def action_logs(self) -> None:
        """Suspend the screen and show the log of the job until q."""
        job = self._selected()
        if job is None:
            return
        with self.suspend():
            show_log(job.id, job.name, follow=not job.state.terminal)
        self.refresh()

    def action_cancel(self) -> None:
        """Cancel the selected job after confirmation."""
        job = self._selected()
        if job is None or job.state not in (JobState.RUNNING, JobState.PENDING):
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(lambda: self._cancel(job.id), thread=True)

        self.push_screen(
            ConfirmDialog(f"Cancel job {job.id} ({strip_control(job.name)})? This cannot be undone."), answered
        )

    def action_toggle_ended(self) -> None:
        """Show or hide ended jobs."""
        self._ended = not self._ended
        self.draw(self._overview, self._frame)

    def action_search(self) -> None:
        """Ask for a text; while it is typed, only jobs and nodes with it are shown."""
        field = self.query_one("#search", Input)
        field.display = True
        field.focus()

    def action_end_search(self) -> None:
        """Show all jobs and nodes again."""
        field = self.query_one("#search", Input)
        field.value, field.display = "", False
        self._table().focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search for what is typed."""
        self._wanted = event.value.strip()
        self.draw(self._overview, self._frame)

    def on_input_submitted(self) -> None:
        """Keep the search, and go back to the jobs."""
        self._table().focus()

    def _cancel(self, job_id: str) -> None:
        try:
            self._head.cancel(job_id, "cancelled in phalanx top")
        except PhalanxError as error:
            self.call_from_thread(self._show_error, error.message)
