"""A list of machines that several calls share: a head that restarts settles thousands of orders with one, not with one each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")
AGE_MAX_S: Final = 20.0  # after this the machines have changed too much for it


class SharedList(Generic[T]):
    """The newest complete list of each account. Any thread may ask; those that ask while one is fetched wait for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._fetching: dict[Hashable, threading.Lock] = {}
        self._newest: dict[Hashable, tuple[float, Sequence[T]]] = {}

    def get(self, account: Hashable, fetch: Callable[[], Sequence[T]], *, begun_after_s: float) -> Sequence[T]:
        """Return a list that was asked for after this time, at most `AGE_MAX_S` ago; `fetch` gets a new one.

        Args:
            account: whose machines; lists of different accounts are independent.
            fetch: as for `account`, the whole list.
            begun_after_s: by the clock: the last call whose outcome the list must show.

        Raises:
            OSError: `fetch` failed. The next caller tries again.
        """
        with self._guard:
            fetching = self._fetching.setdefault(account, threading.Lock())
        with fetching:
            now_s = self._clock()
            begun_s, found = self._newest.get(account, (float("-inf"), ()))
            if begun_s <= begun_after_s or begun_s < now_s - AGE_MAX_S:
                found = fetch()
                self._newest[account] = now_s, found
            return found
