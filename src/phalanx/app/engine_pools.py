"""Keeps the node pools that the options of the engine ask for (`ports.provider.EnginePools`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node_pool import NodePool
from phalanx.core.ids import UserId
from phalanx.core.state.events import PutNodePool, RemoveNodePool
from phalanx.engines.registry import engine_type
from phalanx.ports.provider import EnginePools, PoolTerms

if TYPE_CHECKING:
    from phalanx.controller.driver import ControllerDriver
    from phalanx.controller.provider_calls import ProviderCalls

BY: Final = UserId("head")  # who added such a pool; pools that people add are left alone
_ANSWER_S: Final = 30.0
_log = logging.getLogger("phalanx.head")


def keep_engine_pools(
    engine: str, options: Mapping[str, str], driver: ControllerDriver, providers: ProviderCalls, now_s: float
) -> None:
    """Add or change the pools that the options ask for, and remove those that earlier options asked for."""
    own = engine_type(engine)
    wanted = {pool.id: pool for pool in own.pools(options)} if isinstance(own, EnginePools) else {}
    known = driver.controller.world.node_pools
    for pool_id, pool in list(known.items()):
        if pool.by == BY and pool_id not in wanted and not pool.removing:
            driver.request(RemoveNodePool(pool_id=pool_id, by=BY)).result(timeout=_ANSWER_S)
    for one in wanted.values():
        try:
            pool = known.get(one.id) or NodePool(
                id=one.id,
                provider=engine,
                template=providers.provider(engine).offer(PoolTerms(template=one.template)),
                min_nodes=one.min_nodes,
                max_nodes=one.max_nodes,
                price_per_h=0.0,
                idle_s=one.idle_s,
                start_limit_s=one.start_limit_s,
                by=BY,
                created_s=now_s,
            )
            limits = replace(
                pool,
                min_nodes=one.min_nodes,
                max_nodes=one.max_nodes,
                idle_s=one.idle_s,
                start_limit_s=one.start_limit_s,
            )
            driver.request(PutNodePool(pool=limits)).result(timeout=_ANSWER_S)
        except PhalanxError as error:
            _log.error("node pool %s: %s", one.id, error)
