"""Prints the output of all elements of an array, each line with its element. Called by `phalanx logs`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from phalanx.cli.jobs.log_pages import all_pages, check_rank, tail_page
from phalanx.cli.jobs.log_printer import JsonPrinter, LogPrinter
from phalanx.core.work.array import parse_array
from phalanx.core.work.states import JobState
from phalanx.wire.api.jobs import JobView

if TYPE_CHECKING:
    from phalanx.client import Client

_POLL_S: Final = 0.5  # one request a round for the array, and one for each element that runs or has just ended


def print_array_logs(
    head: Client,
    array: JobView,
    *,
    rank: str | None,
    tail: int | None,
    attempt: int | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Print the output of every element that has started, in order of the index; with `follow` until the array ends."""
    printer = _ArrayPrinter(head, rank=rank, tail=tail, attempt=attempt, as_json=as_json)
    while True:
        printer.print_new(array)
        if array.state.terminal or not follow:
            printer.finish()
            return
        time.sleep(_POLL_S)
        array = head.job(array.id).job


class _ArrayPrinter:
    """The output printed so far: a printer and a cursor for each element that has started and not ended."""

    def __init__(self, head: Client, *, rank: str | None, tail: int | None, attempt: int | None, as_json: bool) -> None:
        self._head = head
        self._rank, self._tail, self._attempt = rank, tail, attempt
        self._as_json = as_json
        self._alone: bool | None = None  # whether an element is one task; known once one has started
        self._cursors: dict[str, str] = {}
        self._printers: dict[str, LogPrinter | JsonPrinter] = {}
        self._complete: set[str] = set()

    def print_new(self, array: JobView) -> None:
        """Print what the elements wrote since the last call."""
        ended = {state: numbers for state, numbers in array.state_elements.items() if state.terminal}
        running = array.state_elements.get(JobState.RUNNING, "")
        indices = dict.fromkeys(parse_array(running).indices, False) if running else {}
        for numbers in ended.values():
            indices |= dict.fromkeys(parse_array(numbers).indices, True)
        for index in sorted(indices):
            element = f"{array.id}_{index}"
            if element not in self._complete:
                self._print_element(element)
                if indices[index]:
                    self._printers.pop(element).finish()
                    self._complete.add(element)

    def finish(self) -> None:
        """Print incomplete lines of elements that still run."""
        for printer in self._printers.values():
            printer.finish()

    def _print_element(self, element: str) -> None:
        if element not in self._printers:
            self._printers[element] = self._new_printer(element)
        printer, rank = self._printers[element], self._rank or "all"
        if element in self._cursors:
            pages = all_pages(self._head, element, rank, self._attempt, self._cursors[element])
        elif self._tail is None:
            pages = all_pages(self._head, element, rank, self._attempt)
        else:
            pages = iter([tail_page(self._head, element, rank, self._attempt, self._tail)])
        for page in pages:
            for chunk in page.chunks:
                printer.write(chunk.epoch, chunk.stream, chunk.text)
            self._cursors[element] = page.cursor
        printer.flush()

    def _new_printer(self, element: str) -> LogPrinter | JsonPrinter:
        if self._alone is None:
            attempts = self._head.job(element).attempts  # none of an element that was cancelled while it waited
            check_rank(element, self._rank, attempts)
            self._alone = sum(grant.tasks for grant in attempts[-1].grants) == 1 if attempts else None
        if self._as_json:
            return JsonPrinter(element)
        return LogPrinter(prefix=True, owner=element, alone=self._alone is not False)
