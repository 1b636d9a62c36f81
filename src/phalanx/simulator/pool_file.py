"""Reads the pools of a replay from a file (YAML 1.2). Errors name the line.

burst: when wait > 2h and price < 200   # for all jobs; always by default
queues: {6214e9: never}                 # for the jobs of a virtual cluster
pools:
  cloud:
    node: 8                             # GPUs of a node; h100:8 on a fleet that names models
    max: 20                             # nodes at most; min: 0
    price: 16                           # of a node, in US dollars an hour
    boot: 5m                            # from the request until it is up; 5m by default
    idle: 5m                            # released after so long without a job; 5m by default
    cap: 400                            # all nodes together, in US dollars an hour
    month-cap: 20000                    # in US dollars a month
    billed: second                      # or hour
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node_pool import POOL_NODES_MAX, NodePool, NodeTemplate, PaidBy
from phalanx.core.ids import PoolId, QueueId, UserId
from phalanx.core.units import parse_duration_s
from phalanx.core.work.burst_rule import BurstRule, parse_burst_rule
from phalanx.core.work.names import is_name
from phalanx.core.work.queue import Queue
from phalanx.simulator.cluster import QUEUE, node_of
from phalanx.simulator.fleet import GPUS_PER_NODE_MAX, TraceNode
from phalanx.simulator.rented_nodes import RentedPool
from phalanx.user_files.yaml_document import FileKind, YamlValue, parse_yaml

POOL_FILE: Final = FileKind(
    name="pool file",
    example="write pools: {cloud: {node: 8, max: 20, price: 16}}",
    bytes_max=256 << 10,
    depth_max=8,
    events_max=20_000,
)
_POOL_KEYS: Final = ("node", "min", "max", "price", "boot", "idle", "cap", "month-cap", "billed")
_NODE: Final = re.compile(r"(?:([a-z][a-z0-9_.-]*):)?([0-9]{1,5})", re.IGNORECASE)
_AMOUNT: Final = re.compile(r"\$?([0-9]{1,9}(?:\.[0-9]{1,6})?)")
_BOOT_S: Final = 300.0
_IDLE_S: Final = 300.0
_START_LIMIT_S: Final = 86_400.0  # a replayed node never fails to start


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalPlan:
    """Pools, and the queues whose rules decide on orders; `queues` has the default queue."""

    pools: tuple[RentedPool, ...]
    queues: tuple[Queue, ...]


def parse_pool_file(text: str, *, path: str) -> RentalPlan:
    """Return the pools of a text; `path` is for messages.

    Raises:
        BadFile: it is not YAML, or has a wrong key or value; the message names the line.
    """
    root = parse_yaml(text, POOL_FILE, path=path)
    inside = root.mapping("pool file", ("burst", "queues", "pools"))
    if "pools" not in inside or not inside["pools"].mapping("pools"):
        raise root.error("no pools", POOL_FILE.example)
    rule = _rule(inside["burst"]) if "burst" in inside else BurstRule()
    queues = [Queue(id=QUEUE, burst=rule)]
    for name, own in inside["queues"].mapping("queues").items() if "queues" in inside else ():
        if name == QUEUE:
            raise own.error(f"queues: {QUEUE} has the rule of the file", "write burst: beside pools:")
        queues.append(Queue(id=QueueId(name), burst=_rule(own)))
    pools = [_pool(name, value) for name, value in inside["pools"].mapping("pools").items()]
    return RentalPlan(pools=tuple(pools), queues=tuple(queues))


def _rule(value: YamlValue) -> BurstRule:
    try:
        return parse_burst_rule(value.text("burst"))
    except BadRequest as error:
        raise value.error(error.message, error.hint) from None


def _pool(name: str, value: YamlValue) -> RentedPool:
    if not is_name(name) or "+" in name:
        raise value.error(f"{name[:60]!r} is not a valid name for a pool")
    inside = value.mapping(name, _POOL_KEYS)
    missing = next((key for key in ("node", "max", "price") if key not in inside), None)
    if missing is not None:
        raise value.error(f"pool {name}: {missing} is missing", POOL_FILE.example)
    text = inside["node"].text("node").strip()
    shape = _NODE.fullmatch(text)
    if shape is None or not 1 <= int(shape[2]) <= GPUS_PER_NODE_MAX:
        raise inside["node"].error(f"node: {text[:40]!r} is not a number of GPUs", "write node: 8, or node: h100:8")
    sample = node_of(TraceNode(name=name, gpus=int(shape[2]), model=shape[1] or ""))
    devices = tuple(
        Device(index=one.index, uuid="", model=one.model, memory_bytes=one.memory_bytes) for one in sample.devices
    )
    most, least = _count(inside, "max", POOL_NODES_MAX), _count(inside, "min", 0)
    if not least <= most <= POOL_NODES_MAX:
        raise value.error(f"pool {name}: {least} to {most} nodes", f"0 to {POOL_NODES_MAX}, the minimum first")
    pool = NodePool(
        id=PoolId(name),
        provider="simulated",
        template=NodeTemplate(text=text, devices=devices, cpus=sample.cpus, memory_bytes=sample.memory_bytes),
        min_nodes=least,
        max_nodes=most,
        price_per_h=_amount(inside, "price") or 0.0,
        cap_per_h=_amount(inside, "cap"),
        cap_per_month=_amount(inside, "month-cap"),
        billed=_billed(inside["billed"]) if "billed" in inside else PaidBy.SECOND,
        idle_s=_time(inside, "idle", _IDLE_S),
        start_limit_s=_START_LIMIT_S,
        by=UserId("trace"),
    )
    return RentedPool(pool=pool, boot_s=_time(inside, "boot", _BOOT_S))


def _count(inside: Mapping[str, YamlValue], key: str, default: int) -> int:
    if key not in inside:
        return default
    text = inside[key].text(key).strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise inside[key].error(f"{key}: {text[:40]!r} is not a number of nodes")
    return int(text)


def _amount(inside: Mapping[str, YamlValue], key: str) -> float | None:
    if key not in inside:
        return None
    text = inside[key].text(key).strip()
    match = _AMOUNT.fullmatch(text.removesuffix("/h").removesuffix("/month"))
    if match is None:
        raise inside[key].error(f"{key}: {text[:40]!r} is not an amount in US dollars", f"write {key}: 16")
    return float(match[1])


def _time(inside: Mapping[str, YamlValue], key: str, default_s: float) -> float:
    if key not in inside:
        return default_s
    try:
        seconds = parse_duration_s(inside[key].text(key).strip(), what=key)
    except BadRequest as error:
        raise inside[key].error(error.message, error.hint) from None
    if not (math.isfinite(seconds) and seconds < _START_LIMIT_S):
        raise inside[key].error(f"{key}: at most a day")
    return seconds


def _billed(value: YamlValue) -> PaidBy:
    text = value.text("billed").strip()
    if text not in tuple(PaidBy):
        raise value.error(f"billed: {text[:40]!r} is neither second nor hour")
    return PaidBy(text)
