"""Labels that operators put on nodes, for example their place in the network. A request applies whole or not at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.access.audit import join_names
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.fleet.node import Node
from phalanx.core.hints import Hint, HintCode
from phalanx.core.state.events import LabelNodes
from phalanx.core.work.users import Action

LABELS_MAX: Final = 64  # of one node; the same as for one job
_VALUE_MAX: Final = 128  # characters; a rack's name has ten
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")


handlers: Final = RequestHandlers()


@handlers.add(LabelNodes, Action.OPERATE, audit=lambda request, _: f"nodes {join_names(sorted(request.labels))}")
def label(context: StepContext, request: LabelNodes) -> None:
    """Set the labels; an empty value removes one. Other labels stay. Idempotent.

    Raises:
        NotFound: a node does not exist.
        BadRequest: an invalid name or value, or too many labels.
    """
    changed: list[Node] = []
    for node_id in sorted(request.labels):
        node = context.world.nodes.get(node_id)
        if node is None:
            raise NotFound(f"no node {node_id!r} has joined", hint=Hint(HintCode.LIST_NODES))
        _check(node_id, request.labels[node_id])
        after = {name: text for name, text in {**node.labels, **request.labels[node_id]}.items() if text}
        if len(after) > LABELS_MAX:
            raise BadRequest(f"{node_id} would have {len(after)} labels; at most {LABELS_MAX} are allowed")
        if after != node.labels:
            changed.append(replace(node, labels=after, changed_s=context.now.wall_s))
    if not changed:
        return
    for node in changed:
        context.change.put(node)
    named = fold_hostlist([node.id for node in changed])
    context.add_history("labelled", f"{named[:200]}: labels changed by {request.by}", by=request.by)


def _check(node_id: str, labels: Mapping[str, str]) -> None:
    for name, text in labels.items():
        if (
            not _NAME.fullmatch(name)
            or len(text) > _VALUE_MAX
            or (text and not text.isprintable())
            or text != text.strip()
        ):
            raise BadRequest(
                f"{node_id}: {name[:64]!r}: {text[:40]!r} is not a label",
                hint=f"use a short name and a printable value of at most {_VALUE_MAX} characters",
            )
