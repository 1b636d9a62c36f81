"""What the providers of rented machines have in common: how a machine joins, whose it is, and the template of its pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node_pool import NodeOffer, NodeTemplate
from phalanx.ports.engine import EngineContext, MachineJoin
from phalanx.ports.provider import NodeOrder

_OWNER_LENGTH: Final = 16


def require_listening(head: EngineContext) -> None:
    """Check that machines can reach the head.

    Raises:
        BadRequest: it listens only on loopback.
    """
    if head.machine_join is None:
        raise BadRequest(
            "machines join by the network, but the head listens only on loopback", hint="phalanx up --listen ADDRESS"
        )


def refusal(cloud: str, provider: str, error: OSError) -> BadRequest:
    """Return the error of a call that a cloud refused, with what to do next."""
    return BadRequest(f"{cloud} refuses: {error}", hint=f"phalanx clouds check {provider}")


def join_of(head: EngineContext, order: NodeOrder) -> MachineJoin:
    """Return how the machine of an order joins. A machine that cannot join would be paid for until it is given up.

    Raises:
        BadRequest: the head listens only on loopback now.
    """
    require_listening(head)
    assert head.machine_join is not None
    return head.machine_join(order.node_id, order.token)


def owner_of(head: EngineContext) -> str:
    """Return the mark of all machines of a head, by which they are listed."""
    return head.derive_id("provider owner")[:_OWNER_LENGTH]


def rented_template(text: str, shape: tuple[tuple[Device, ...], int, int], offers: Sequence[NodeOffer]) -> NodeTemplate:
    """Return the template of a pool whose machines the cloud lists, and which share no network with others.

    Args:
        text: types of machines, as the provider reads them.
        shape: devices, CPUs and bytes of memory of one.
        offers: in the order in which they are tried.
    """
    devices, cpus, memory_bytes = shape
    return NodeTemplate(
        text=text,
        devices=devices,
        cpus=cpus,
        memory_bytes=memory_bytes,
        offers=tuple(offers),
        listed=True,
        apart=True,
    )
