"""Ray for `phalanx up` and `phalanx join`. Without heavy imports: every `phalanx up` loads it."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.engines.ray.options import ADDRESS, ENGINE_NAME, OPTIONS
from phalanx.ports.engine import Engine, EngineContext, EngineType, HeadSetup, KeeperStop, Membership


class RayEngineType(EngineType):
    """See the module."""

    name = ENGINE_NAME
    title = "Ray"
    options = OPTIONS
    nodes_start_s = 60.0  # Ray's own processes take 5 to 10 s on each machine before ours start
    member_starts_s = 90.0  # Ray's own processes start first: 8 s, up to 17 s measured on a busy machine
    job_account = "the account of Ray's nodes"

    def check(self, given: Mapping[str, str], previous: Mapping[str, str] | None, setup: HeadSetup) -> dict[str, str]:
        """Check the options, and the Ray cluster or the Redis that they name."""
        from phalanx.engines.ray.head_setup import check_options

        return check_options(self.resolve(given, previous), given, setup)

    def uses_local_nodes(self, options: Mapping[str, str]) -> bool:
        """The nodes of an existing cluster are that cluster's."""
        return not options[ADDRESS]

    def create(self, options: Mapping[str, str], head: EngineContext) -> Engine:
        """Create the engine, with a cluster of our own unless an existing one is used."""
        from phalanx.engines.ray.head_setup import create_engine

        return create_engine(options, head)

    def prepare_member(self, folder: str, settings: Mapping[str, str]) -> dict[str, str]:
        """Check that Ray and Python are the head's, and write the credentials of this server's Ray node."""
        from phalanx.engines.ray.joined_node import prepare

        return prepare(folder, settings)

    def keep_member(self, folder: str, membership: Membership, ended: KeeperStop) -> None:
        """Keep the Ray node running; its actor keeps the supervisor."""
        from phalanx.engines.ray.joined_node import keep_ray_node

        keep_ray_node(folder, membership, ended)
