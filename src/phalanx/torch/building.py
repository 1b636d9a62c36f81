"""Behind `phalanx.torch.mesh` and `parallelize`: the session's device and ranks, the layout that counts here, and what is said of it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.work.layout import Layout
from phalanx.torch.chosen import AUTO, Chooser, chosen
from phalanx.torch.device_mesh import build_mesh, crossing
from phalanx.torch.session import Session
from phalanx.torch.training import Recipe, Training

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def mesh(session: Session, layout: Layout | str | None) -> Any:
    """See `phalanx.torch.mesh`."""

    def no_model(_machine: Mapping[str, Any] | None) -> Layout:
        raise BadRequest(
            f"layout {AUTO!r} is chosen for a model, and mesh() has none",
            hint="call parallelize(model, ...), whose result has the mesh",
        )

    with _refusing_together(session):
        found = _chosen(session, layout, no_model)
        return build_mesh(found, session.device.type)


def parallelize(session: Session, model: Any, layout: Layout | str | None, recipe: Recipe) -> Training:
    """See `phalanx.torch.parallelize`."""
    from phalanx.torch.assembly import assemble

    local = session.environment.local_world_size

    def planned(machine: Mapping[str, Any] | None) -> Layout:
        from phalanx.torch.automatic import choose

        return choose(model, session.world_size, machine, local=local, sequence=recipe.sequence, batch=recipe.batch)

    with _refusing_together(session):
        found = _chosen(session, layout, planned)
        training = assemble(model, found, recipe, device=session.device)
    if session.rank == 0:
        print(f"phalanx: layout {found}: {session.world_size} ranks", flush=True)
        if said := crossing(found, local_world_size=local):
            print(f"phalanx: {said}", flush=True)
    return training


def _chosen(session: Session, layout: Layout | str | None, choose: Chooser) -> Layout:
    environment = session.environment
    return chosen(layout, environment.layout, environment.machine, ranks=session.world_size, choose=choose)


@contextlib.contextmanager
def _refusing_together(session: Session) -> Iterator[None]:
    """All ranks come to the same refusal here, so one of them says it. From now on refusals are one line, also those of a later step."""
    _speak_plainly()
    try:
        yield
    except PhalanxError as refused:
        if session.rank != 0:
            refused.add_note(_SAID_ELSEWHERE)
        raise


_SAID_ELSEWHERE = "rank 0 says it"


def _speak_plainly() -> None:
    """Let an uncaught refusal end the script with one line; anything else ends it as it did before."""
    before = sys.excepthook
    if getattr(before, "func", None) is not _end:
        sys.excepthook = functools.partial(_end, before)


def _end(before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a refusal, unless another rank does."""
    if not isinstance(error, PhalanxError):
        before(kind, error, trace)
    elif _SAID_ELSEWHERE not in getattr(error, "__notes__", ()):
        print(f"phalanx: {error.message}" + (f"; {error.hint}" if error.hint else ""), file=sys.stderr, flush=True)
