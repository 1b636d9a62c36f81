"""Random streams of requests for MIG slices, the most that could be accepted of one, and the best rule that does not know the future.

A request comes at its time, wants one slice of one profile, and keeps it until its end. It is accepted if the slice fits anywhere when it
comes, else it is lost. Slices do not move. So only the positions differ between a good rule and a bad one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from phalanx.core.fleet.mig import MigProfile, MigSlice
from phalanx.core.scheduling.sharing.mig_placement import MigGeometry, MigState, mig_geometry, place_slice

Profiles = tuple[MigProfile, ...]
Held = tuple[float, str, int]  # end, profile, start
Block = tuple[str, int]  # profile, start
ROUNDS_MAX: Final = 2_000  # of value iteration
SETTLED: Final = 1e-6  # change of the values, in requests, at which it ends


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRequest:
    """One request: its profile, when it comes, and when its slice is given back."""

    profile: str
    at_s: float
    ends_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStream:
    """Requests in order of time, with what they were drawn from.

    Attributes:
        weights: of the profiles.
        hold_s: mean time that a slice is kept; a request comes each second on average.
    """

    requests: tuple[SliceRequest, ...]
    weights: Mapping[str, float]
    hold_s: float


def draw_stream(rng: random.Random, profiles: Profiles, *, gpus: int, requests: int, load: float) -> RequestStream:
    """Draw a stream whose slices would use the share `load` of the memory slices of all GPUs, if each request were accepted.

    Each stream has its own mix of profiles: exponential weights, so that every mix is equally likely. Arrivals are a Poisson process, holding
    times are exponential.
    """
    weights = {one.name: rng.expovariate(1.0) for one in profiles}
    size = sum(weights[one.name] * one.memory_slices for one in profiles) / sum(weights.values())
    width = max(start + one.memory_slices for one in profiles for start in one.starts)
    hold_s = load * width * gpus / size
    now_s, drawn = 0.0, []
    for _ in range(requests):
        now_s += rng.expovariate(1.0)
        name = rng.choices(list(weights), list(weights.values()))[0]
        drawn.append(SliceRequest(profile=name, at_s=now_s, ends_s=now_s + rng.expovariate(1.0 / hold_s)))
    return RequestStream(requests=tuple(drawn), weights=weights, hold_s=hold_s)


# ------------------------------------------------------------------------------------------------------------- rules

Rule = Callable[[SliceRequest, Sequence[Sequence[Held]]], tuple[int, int] | None]


def accepted(stream: RequestStream, gpus: int, rule: Rule) -> int:
    """Return how many requests are accepted if `rule` picks the GPU and the start of each."""
    held: list[list[Held]] = [[] for _ in range(gpus)]
    count = 0
    for request in stream.requests:
        held = [[one for one in gpu if one[0] > request.at_s] for gpu in held]
        found = rule(request, held)
        if found is not None:
            held[found[0]].append((request.ends_s, request.profile, found[1]))
            count += 1
    return count


def our_rule(profiles: Profiles) -> Rule:
    """Return the rule of the product, which knows neither the stream's mix nor when a slice is given back."""
    geometry = mig_geometry(profiles)

    def choose(request: SliceRequest, held: Sequence[Sequence[Held]]) -> tuple[int, int] | None:
        found = place_slice(request.profile, [(geometry, state_of(geometry, gpu)) for gpu in held])
        return None if found is None else (found.device, found.start)

    return choose


def first_fit(profiles: Profiles) -> Rule:
    """Return the rule that takes the first GPU and the lowest start that fit."""
    geometry = mig_geometry(profiles)

    def choose(request: SliceRequest, held: Sequence[Sequence[Held]]) -> tuple[int, int] | None:
        starts = [geometry.starts(request.profile, state_of(geometry, gpu)) for gpu in held]
        return next(((gpu, own[0]) for gpu, own in enumerate(starts) if own), None)

    return choose


def state_of(geometry: MigGeometry, held: Sequence[Held]) -> MigState:
    """Return the state of a GPU that holds these slices."""
    return geometry.state(
        MigSlice(profile=name, start=start, memory_slices=geometry.profiles[name].memory_slices)
        for _, name, start in held
    )


# ---------------------------------------------------------------------------------------------------------- the most


def most_accepted(stream: RequestStream, profiles: Profiles, gpus: int) -> int:
    """Return the most requests of the stream that any choice of GPUs and starts accepts, by trying all.

    The clairvoyant optimum: it knows every arrival and every end. Like any rule here it has to accept a request that fits. All states that
    some choice can reach are kept, each with the most requests accepted on the way; equal GPUs are not told apart.
    """
    geometry = mig_geometry(profiles)
    reached: dict[tuple[tuple[Held, ...], ...], int] = {((),) * gpus: 0}
    for request in stream.requests:
        now: dict[tuple[tuple[Held, ...], ...], int] = {}
        for state, count in reached.items():
            left = tuple(sorted(tuple(one for one in gpu if one[0] > request.at_s) for gpu in state))
            now[left] = max(count, now.get(left, 0))
        reached = {}
        for state, count in now.items():
            after = [
                tuple(
                    sorted(
                        (
                            *state[:number],
                            tuple(sorted((*gpu, (request.ends_s, request.profile, start)))),
                            *state[number + 1 :],
                        )
                    )
                )
                for number, gpu in enumerate(state)
                if gpu not in state[:number]
                for start in geometry.starts(request.profile, state_of(geometry, gpu))
            ]
            for one in after or [state]:
                reached[one] = max(count + bool(after), reached.get(one, 0))
    return max(reached.values())


# ------------------------------------------------------------------------------------------- without knowing the future


def best_rule(stream: RequestStream, profiles: Profiles) -> Rule:
    """Return the rule for one GPU that accepts the most requests in the long run among all that do not know the future.

    It knows the stream's mix and mean holding time, which our rule does not. Found by value iteration over all sets of slices on the GPU
    (a loss system with exponential holding times). Source: M. Puterman, "Markov Decision Processes", 1994, chapters 8 and 11.
    """
    geometry = mig_geometry(profiles)
    layouts = _layouts(geometry)
    number = {layout: at for at, layout in enumerate(layouts)}
    most = max(map(len, layouts))
    total = sum(stream.weights.values())
    rate = 1.0 + most / stream.hold_s  # of arrivals and ends together, at most
    leaving = np.array(
        [
            [number[layout - {block}] for block in layout] + [at] * (most - len(layout))
            for at, layout in enumerate(layouts)
        ]
    )
    options = []
    for name, weight in stream.weights.items():
        starts = [geometry.starts(name, _state(geometry, layout)) for layout in layouts]
        after = [
            [number[layout | {(name, start)}] for start in own] for layout, own in zip(layouts, starts, strict=True)
        ]
        width = max(map(len, after))
        table = np.array([(own + own[-1:] * width)[:width] if own else [-1] * width for own in after])
        options.append((weight / total, table))
    value = _values(leaving, options, rate, 1.0 / stream.hold_s, number[frozenset()])

    def choose(request: SliceRequest, held: Sequence[Sequence[Held]]) -> tuple[int, int] | None:
        layout = frozenset((name, start) for _, name, start in held[0])
        starts = geometry.starts(request.profile, _state(geometry, layout))
        if not starts:
            return None
        return 0, max(starts, key=lambda start: value[number[layout | {(request.profile, start)}]])

    return choose


def _values(
    leaving: NDArray[np.int64],
    options: Sequence[tuple[float, NDArray[np.int64]]],
    rate: float,
    leave_rate: float,
    empty: int,
) -> NDArray[np.float64]:
    """Return what each layout is worth in requests, against the empty one."""
    value = np.zeros(len(leaving))
    for _ in range(ROUNDS_MAX):
        new = leave_rate * value[leaving].sum(axis=1)
        for weight, table in options:
            fits = table[:, 0] >= 0
            new += weight * np.where(fits, 1.0 + value[table].max(axis=1), value)
        new /= rate
        new -= new[empty]
        change = float(np.abs(new - value).max())
        value = new
        if change < SETTLED:
            break
    return value


def _layouts(geometry: MigGeometry) -> list[frozenset[Block]]:
    """Return every set of slices that one GPU can hold, each profile apart."""
    found: dict[frozenset[Block], None] = {frozenset(): None}
    todo: list[frozenset[Block]] = [frozenset()]
    while todo:
        layout = todo.pop()
        state = _state(geometry, layout)
        for name in geometry.profiles:
            for start in geometry.starts(name, state):
                larger = layout | {(name, start)}
                if larger not in found:
                    found[larger] = None
                    todo.append(larger)
    return list(found)


def _state(geometry: MigGeometry, layout: frozenset[Block]) -> MigState:
    state = MigState(0, media=False)
    for name, start in layout:
        state = geometry.with_instance(name, start, state)
    return state
