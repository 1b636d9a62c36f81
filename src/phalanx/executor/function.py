"""`@phalanx.function`: a function that can also run on the cluster."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, overload

from phalanx.executor.executor import Executor
from phalanx.executor.futures import TaskFuture

P = ParamSpec("P")
R = TypeVar("R")


class RemoteFunction(Generic[P, R]):
    """A function with an Executor of its own, which starts with the first remote call and ends with the program.

    Called as it is, it runs here.
    """

    def __init__(self, function: Callable[P, R], given: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._given = function, {"name": function.__name__, **given}
        self._executor: Executor | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it here."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Travel as the plain function: in a worker a call runs there."""
        return _itself, (self._function,)

    @property
    def executor(self) -> Executor:
        """Its Executor; a new one after `close`."""
        with self._lock:
            if self._executor is None:
                self._executor = Executor(**self._given)
            return self._executor

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> TaskFuture:
        """Run it in a worker; return the future."""
        return self.executor.submit(self._function, *args, **kwargs)

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it in a worker, and wait for its result."""
        result: R = self.submit(*args, **kwargs).result()
        return result

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it in a worker, and await its result. Cancelling the awaiting task cancels the call, unless a worker has it."""
        result: R = await asyncio.wrap_future(self.submit(*args, **kwargs))
        return result

    def map(self, *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1) -> Iterator[R]:
        """Run it for each item; see `Executor.map`."""
        return self.executor.map(self._function, *iterables, timeout=timeout, chunksize=chunksize)

    def close(self) -> None:
        """Wait for its calls, and end its job."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()


class _Decorator:
    """`@phalanx.function(...)` with arguments."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def __call__(self, function: Callable[P, R]) -> RemoteFunction[P, R]:
        return RemoteFunction(function, self._given)


@overload
def function(function: Callable[P, R], /) -> RemoteFunction[P, R]: ...
@overload
def function(**given: Any) -> _Decorator: ...
def function(function: Callable[P, R] | None = None, /, **given: Any) -> RemoteFunction[P, R] | _Decorator:
    """Decorate a function, so that `f.submit(x)`, `f.remote(x)`, `f.map(xs)` and `await f.aio(x)` run it on the cluster.

    Args:
        function: without parentheses: `@phalanx.function`.
        given: arguments of `Executor`: gpus, max_workers, and keys of a job file.
    """
    if function is None:
        return _Decorator(given)
    return RemoteFunction(function, given)


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
