"""The end of a head: what its providers of clouds stop, by the clouds' own lists."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol

from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine
from phalanx.ports.provider import CallUnanswered, EndedOrder, NodeOrder

THREADS: Final = 8
TRIES: Final = 3
PAUSE_S: Final = 0.5
_log = logging.getLogger("phalanx.providers")


class StoppingProvider(Protocol):
    """What of a provider is needed here."""

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """See the port."""
        ...

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """See the port."""
        ...


def stop_everything(
    provider: StoppingProvider, orders: Iterable[NodeOrder], account_of: Callable[[Mapping[str, str]], Hashable]
) -> Sequence[EndedOrder]:
    """Stop all these orders, and every other machine of their accounts, several at a time; return what was stopped for certain.

    Args:
        provider: whose machines they are.
        orders: all that the provider has seen. One without a listed machine is stopped too: a list may lag behind a start.
        account_of: which settings reach the same machines.
    """
    known = {order.token: order for order in orders}
    due = list(known.values())
    accounts = {account_of(order.settings): order.settings for order in due}
    for account, settings in accounts.items():
        try:
            listed = provider.machines(settings)
        except OSError as error:
            _log.error("the list of %s failed, so only known orders are stopped: %s", account, error)
            continue
        due += [
            NodeOrder(
                node_id=one.node_id,
                token=one.token,
                template="",
                offer=one.offer,
                settings=settings,
                machine=one.machine,
            )
            for one in listed
            if one.token not in known and not one.ended
        ]
    with ThreadPoolExecutor(THREADS) as threads:
        return [one for one in threads.map(partial(_stop, provider), due) if one is not None]


def _stop(provider: StoppingProvider, order: NodeOrder) -> EndedOrder | None:
    """Stop an order, or one machine of it; None if that is not certain."""
    for _ in range(TRIES):
        try:
            stopped = tuple(provider.stop(order))
        except CallUnanswered as error:
            _log.warning("the stop of %s was not answered: %s", order.node_id or order.machine, error)
            time.sleep(PAUSE_S)
        except OSError as error:
            _log.error("the machine of %s runs until it ends itself: %s", order.node_id or order.machine, error)
            return None
        else:
            return EndedOrder(node_id=order.node_id, token=order.token, stopped=stopped, stray=bool(order.machine))
    return None
