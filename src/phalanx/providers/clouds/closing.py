"""The end of a head: what its providers of clouds stop, by the clouds' own lists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol

from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine
from phalanx.ports.provider import NodeOrder, StrayMachine

THREADS: Final = 8
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
) -> Sequence[StrayMachine]:
    """Stop every machine of the accounts of these orders, several at a time; return those that no order has.

    Args:
        provider: whose machines they are.
        orders: all of which the provider was told.
        account_of: which settings reach the same machines.
    """
    known = {order.token: order for order in orders}
    accounts = {account_of(order.settings): order.settings for order in known.values()}
    found: list[StrayMachine] = []
    for account, settings in accounts.items():
        own = [order for order in known.values() if account_of(order.settings) == account]
        try:
            listed = [one for one in provider.machines(settings) if not one.ended]
        except OSError as error:
            _log.error("the list of %s failed, so only known machines are stopped: %s", account, error)
            listed = []
        strays = [one for one in listed if one.token not in known]
        names = {one.machine for one in listed}
        tokens = {one.token for one in listed}
        # A list may lag behind a start: machines that only an answer named are stopped too.
        due = [one for one in own if one.token in tokens or (one.known_machine and one.known_machine not in names)]
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(partial(_stop, provider), due))
            for charged in threads.map(partial(_stop_stray, provider, settings), strays):
                found += charged
    return found


def _stop(provider: StoppingProvider, order: NodeOrder) -> Sequence[ChargedMachine]:
    try:
        return provider.stop(order)
    except OSError as error:
        _log.error("the machine of %s runs until it ends itself: %s", order.node_id, error)
        return ()


def _stop_stray(provider: StoppingProvider, settings: Mapping[str, str], one: ListedMachine) -> Sequence[StrayMachine]:
    order = NodeOrder(
        node_id=one.node_id, token=one.token, template="", offer=one.offer, settings=settings, machine=one.machine
    )
    return [StrayMachine(node_id=one.node_id, token=one.token, charged=charged) for charged in _stop(provider, order)]
