"""Implement `phalanx.torch.mesh` and `parallelize`: choose the layout for the session, build, and report errors once."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.work.layouts.layout import Layout
from phalanx.torch.device_mesh import build_mesh, crossing_warning
from phalanx.torch.layout_choice import AUTO, LayoutPlanner, choose_layout
from phalanx.torch.session import RankSession
from phalanx.torch.training import Training, TrainingRecipe

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def mesh(session: RankSession, layout: Layout | str | None) -> Any:
    """Implement `phalanx.torch.mesh`."""

    def no_model(_machine: Mapping[str, Any] | None) -> Layout:
        raise BadRequest(
            f"layout {AUTO!r} needs a model, but mesh() has none",
            hint="call parallelize(model, ...) and use the mesh of its result",
        )

    with _one_error(session):
        found = _choose(session, layout, no_model)
        return build_mesh(found, session.device.type)


def parallelize(session: RankSession, model: Any, layout: Layout | str | None, recipe: TrainingRecipe) -> Training:
    """Implement `phalanx.torch.parallelize`."""
    from phalanx.torch.assembly import assemble

    local = session.environment.local_world_size

    def planned(machine: Mapping[str, Any] | None) -> Layout:
        from phalanx.torch.auto_layout import plan_layout

        return plan_layout(
            model, session.world_size, machine, local=local, sequence=recipe.sequence, batch=recipe.batch
        )

    with _one_error(session):
        found = _choose(session, layout, planned)
        training = assemble(model, found, recipe, device=session.device)
    if session.rank == 0:
        print(f"phalanx: layout {found}: {session.world_size} ranks", flush=True)
        if warning := crossing_warning(found, local_world_size=local):
            print(f"phalanx: {warning}", flush=True)
    return training


def _choose(session: RankSession, layout: Layout | str | None, choose: LayoutPlanner) -> Layout:
    environment = session.environment
    return choose_layout(layout, environment.layout, environment.machine, ranks=session.world_size, plan_layout=choose)


@contextlib.contextmanager
def _one_error(session: RankSession) -> Iterator[None]:
    """Let only rank 0 print an error that all ranks raise. From then on an uncaught error of Phalanx prints one line, no traceback."""
    _install_hook()
    try:
        yield
    except PhalanxError as error:
        if session.rank != 0:
            error.add_note(_PRINTED_BY_RANK_0)
        raise


_PRINTED_BY_RANK_0 = "rank 0 prints this error"


def _install_hook() -> None:
    """Print an uncaught error of Phalanx as one line. Other exceptions use the previous hook."""
    before = sys.excepthook
    if getattr(before, "func", None) is not _print_error:
        sys.excepthook = functools.partial(_print_error, before)


def _print_error(before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of Phalanx in one line, unless rank 0 prints it."""
    if not isinstance(error, PhalanxError):
        before(kind, error, trace)
    elif _PRINTED_BY_RANK_0 not in getattr(error, "__notes__", ()):
        print(f"phalanx: {error.message}" + (f"; {error.hint}" if error.hint else ""), file=sys.stderr, flush=True)
