"""What a supervisor does before its first member: it ends and removes what an earlier one on this node left."""

from __future__ import annotations

import os
import time

from phalanx.node.head_link.channels import start_thread
from phalanx.node.prepare import container_images, data_mounts
from phalanx.node.prepare.data_mounts import DataMounts
from phalanx.node.prepare.hook_runner import OperatorHooks
from phalanx.node.prepare.mps_daemons import MpsDaemons
from phalanx.node.probes.devices import DeviceProbe
from phalanx.node.shell.node_settings import NodeSettings


def recover_node(
    settings: NodeSettings, probe: DeviceProbe, hooks: OperatorHooks, cache: str
) -> tuple[MpsDaemons, DataMounts]:
    """End the daemons, mounts, hooks, slices, power limits and containers of an earlier supervisor, whose ranks have ended.

    Args:
        settings: of this supervisor.
        probe: of its devices.
        hooks: the operator's.
        cache: the node's cache folder.

    Returns:
        What starts the daemons of shared devices, and what mounts object stores.
    """
    search_path = settings.base.get("PATH", os.defpath)
    mps = MpsDaemons(os.path.join(settings.accounts.folder or settings.folder, "mps"), search_path)
    mps.stop_leftovers()
    mounts = DataMounts(
        folder=os.path.join(settings.folder, "mounts"),
        shared_folder=os.path.join(settings.accounts.folder, "mounts") if settings.accounts.folder else "",
        path=search_path,
        cache_limit=settings.base.get(data_mounts.CACHE_VARIABLE, ""),
    )
    mounts.remove_leftovers()
    hooks.recover()
    if settings.slices is not None:
        settings.slices.recover(probe.devices())
    if settings.power is not None:
        settings.power.recover(time.time())
    start_thread("image-sweep", lambda: container_images.remove_dead_containers(cache, search_path))
    return mps, mounts
