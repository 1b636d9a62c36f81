"""`phalanx nodes mig`: lists the GPU models that MIG can divide, and shows where slices go on one. Also the lines on MIG of a node's page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click
import msgspec

from phalanx.cli.list_output import ListView, show_list
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.fleet.mig import MigProfile, PlacementSource
from phalanx.core.scheduling.sharing.mig_placement import EMPTY, mig_geometry, place_slice
from phalanx.core.units import format_bytes
from phalanx.planner.facts.mig import MigGpuEntry, find_mig_gpu, read_mig_gpus
from phalanx.wire.api.nodes import DeviceView, MigView, ShareView


class MigModelListing(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json` for one GPU model. `profiles`: by name, with their sources."""

    gpu: str
    memory_slices: int
    compute_slices: int
    source: str
    profiles: dict[str, MigProfileListing]


class MigProfileListing(msgspec.Struct, frozen=True, kw_only=True):
    """One profile. `starts_source`: of the starts; `source`: of the rest."""

    profile: MigProfile
    source: str
    starts_source: str


class PlacedSliceListing(msgspec.Struct, frozen=True, kw_only=True):
    """Where `--place` puts a slice. `start`: its first memory slice; None: it does not fit."""

    profile: str
    start: int | None


class MigPlacementListing(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--place --json`. `room`: by profile, how many fit at once after that."""

    gpu: str
    placed: list[PlacedSliceListing]
    room: dict[str, int]


@click.command(name="mig")
@click.argument("gpu", metavar="[GPU]", required=False)
@click.option(
    "--place", "wanted", metavar="PROFILES", help="Place slices on an empty GPU in this order: 3g.40gb,1g.10gb,1g.10gb."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def mig_command(gpu: str | None, wanted: str | None, as_json: bool) -> None:
    """Show the MIG slices that a GPU model can be divided into, or list the models. It needs no head and changes nothing."""
    if gpu is None:
        if wanted is not None:
            raise BadRequest("--place needs a GPU", hint="phalanx nodes mig h100 --place 3g.40gb,1g.10gb")
        found = ListView(
            value=[_listing(one) for one in read_mig_gpus()], lines=_models, next_command="phalanx nodes mig h100"
        )
    else:
        entry = _entry(gpu)
        if wanted is None:
            found = ListView(value=_listing(entry), lines=lambda screen: _profiles(entry, screen))
        else:
            placed = _placed(entry, [word.strip() for word in wanted.split(",")])
            found = ListView(value=placed, lines=lambda screen: _placement(entry, placed, screen))
    show_list(lambda: found, as_json=as_json, watch=False)


def _entry(gpu: str) -> MigGpuEntry:
    found = find_mig_gpu(gpu)
    if found is None:
        known = ", ".join(one.name for one in read_mig_gpus())
        raise NotFound(f"no MIG profiles of {gpu!r} are known", hint=f"known: {known}")
    return found


def _listing(entry: MigGpuEntry) -> MigModelListing:
    return MigModelListing(
        gpu=entry.name,
        memory_slices=entry.memory_slices,
        compute_slices=entry.compute_slices,
        source=f"{entry.fact.source}, {entry.fact.date}",
        profiles={
            one.profile.name: MigProfileListing(
                profile=one.profile,
                source=f"{one.fact.source}, {one.fact.date}",
                starts_source=f"{one.starts_fact.source}, {one.starts_fact.date}",
            )
            for one in entry.entries
        },
    )


def _placed(entry: MigGpuEntry, names: Sequence[str]) -> MigPlacementListing:
    """Place the slices one after the other, as for requests that come in this order."""
    geometry, state, placed = mig_geometry(entry.profiles), EMPTY, []
    for name in names:
        if name not in geometry.profiles:
            raise BadRequest(
                f"--place: {entry.name} has no profile {name!r}", hint=f"it has: {', '.join(geometry.profiles)}"
            )
        position = place_slice(name, [(geometry, state)])
        placed.append(PlacedSliceListing(profile=name, start=None if position is None else position.start))
        if position is not None:
            state = geometry.with_instance(name, position.start, state)
    return MigPlacementListing(
        gpu=entry.name, placed=placed, room={name: geometry.room(name, state) for name in geometry.profiles}
    )


def _models(screen: Terminal) -> list[str]:
    columns = (Column(title="GPU"), Column(title="SLICES", right=True), Column(title="PROFILES", min_width=12))
    rows: list[list[Cell | str]] = [
        [Cell(one.name, "bold"), str(one.memory_slices), _names(one.profiles)] for one in read_mig_gpus()
    ]
    return table(columns, rows, screen)


def _names(profiles: Iterable[MigProfile]) -> str:
    return ", ".join(one.name for one in profiles)


def _profiles(entry: MigGpuEntry, screen: Terminal) -> list[str]:
    columns = (
        Column(title="PROFILE"),
        Column(title="ID", right=True, drop_order=1),
        Column(title="MEMORY", right=True),
        Column(title="COMPUTE", right=True),
        Column(title="SLICES", right=True),
        Column(title="STARTS"),
        Column(title="MOST", right=True),
    )
    rows: list[list[Cell | str]] = [
        [
            Cell(one.name, "bold"),
            str(one.id),
            format_bytes(one.memory_bytes),
            f"{one.compute_slices} of {entry.compute_slices}",
            f"{one.memory_slices} of {entry.memory_slices}",
            ", ".join(map(str, one.starts)),
            str(one.max_instances),
        ]
        for one in entry.profiles
    ]
    facts = dict.fromkeys(fact for one in entry.entries for fact in (one.fact, one.starts_fact))
    sources = [f"source: {one.source}, {one.date}" for one in facts]
    return [
        f"{screen.paint(entry.name, 'bold')}: {entry.memory_slices} memory slices",
        *table(columns, rows, screen),
        *sources,
    ]


def _placement(entry: MigGpuEntry, found: MigPlacementListing, screen: Terminal) -> list[str]:
    sizes = {one.name: one.memory_slices for one in entry.profiles}
    columns = (Column(title="PROFILE"), Column(title="MEMORY SLICES"))
    rows: list[list[Cell | str]] = [
        [
            Cell(one.profile, "bold"),
            Cell("does not fit", "yellow") if one.start is None else _span(one.start, sizes[one.profile]),
        ]
        for one in found.placed
    ]
    return [*table(columns, rows, screen), f"room for {_room(found.room)}"]


def _span(start: int, size: int) -> str:
    return str(start) if size == 1 else f"{start}-{start + size - 1}"


def _room(room: dict[str, int]) -> str:
    """Format what still fits; each profile counts as if the others were not asked for."""
    return " or ".join(f"{count} x {name}" for name, count in room.items() if count) or "nothing more"


def mig_lines(devices: Sequence[DeviceView]) -> list[str]:
    """Return what MIG can do with the GPUs of a node; equal ones share a line, and no line is there for others."""
    alike: dict[str, list[int]] = {}
    for device in devices:
        if device.mig is not None:
            alike.setdefault(_mig_line(device.mig, device.shares), []).append(device.index)
    return [f"MIG of GPU{'s' if len(found) > 1 else ''} {_indexes(found)}: {line}" for line, found in alike.items()]


def _mig_line(mig: MigView, shares: Sequence[ShareView]) -> str:
    if not mig.on:
        return mig.closed_reason or "MIG mode is off"
    jobs = [
        f"{one.profile} on {_span(one.start, one.memory_slices)} of job {share.job_id}"
        for share in shares
        for one in share.slices
    ]
    taken = [f"{one.profile or 'slice'} on {_span(one.start, one.memory_slices)}" for one in mig.slices]
    return "; ".join(
        filter(
            None,
            [
                "on",
                ", ".join(jobs),
                f"slices of others: {', '.join(taken)}" if taken else "",
                f"room for {_room(mig.room)}",
                "starts from the shipped table" if mig.source is PlacementSource.TABLE else "",
                f"no slices: {mig.closed_reason}" if mig.closed_reason else "",
            ],
        )
    )


def _indexes(numbers: Sequence[int]) -> str:
    """Format ascending numbers: `0-3`, `0, 2`."""
    if numbers[-1] - numbers[0] == len(numbers) - 1 and len(numbers) > 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
