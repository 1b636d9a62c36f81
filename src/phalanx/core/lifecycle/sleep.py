"""Sleep of replicas: (attempt, event) -> outcome, for attempts whose ranks run. Called by the attempt machine.

    awake -> FALLING_ASLEEP -> ASLEEP <-> WAITING -> WAKING -> awake
                   '-- failed --------------------->'

A sleeping attempt lives on: same epoch, lease, node and processes; CPUs and memory stay held. Its devices leave the allocation only after
its program has answered the sleep hook, and are in the allocation again before the wake hook is sent. So no device has two users.
"""

from __future__ import annotations

from phalanx.core.lifecycle import gang_commands
from phalanx.core.lifecycle.endpoints import endpoint_line
from phalanx.core.lifecycle.events import DevicesRegained, SleepRequested, WakeDelayed, WakeRequested
from phalanx.core.lifecycle.transitions import AttemptCase, TransitionContext, TransitionResult, history_line, unchanged
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.reports import SleepHookEnded
from phalanx.core.work.attempt import Attempt, Sleep, SleepPhase


def fall_asleep(
    case: AttemptCase, attempt: Attempt, _happening: SleepRequested, facts: TransitionContext
) -> TransitionResult:
    """Announce a ready replica as not ready, then run its sleep hook. One that waits to wake sleeps on."""
    sleep = attempt.sleep
    if sleep is not None and sleep.phase is SleepPhase.WAITING:
        return _with_phase(case, attempt, replace(sleep, phase=SleepPhase.ASLEEP, why=""))
    if not attempt.serving:
        return unchanged(case)
    engines = {node.engine for one in attempt.members if (node := facts.nodes.get(one.node_id)) and node.per_attempt}
    if engines:
        why = f"engine {', '.join(sorted(engines))} takes no devices back from a running job"
        if why == attempt.sleep_refusal:
            return unchanged(case)
        line = history_line(case, facts, "sleep_failed", f"stays awake and keeps its devices: {why}")
        return TransitionResult(job=case.job, attempt=replace(attempt, sleep_refusal=why), history=(line,))
    after = _next_hook(attempt, SleepPhase.FALLING_ASLEEP)
    line = endpoint_line(case, after, facts, "it falls asleep")
    return TransitionResult(job=case.job, attempt=after, commands=gang_commands.sleep_hook(after), history=(line,))


def wish_to_wake(
    case: AttemptCase, attempt: Attempt, _happening: WakeRequested, _facts: TransitionContext
) -> TransitionResult:
    """Let a sleeping replica wait for its devices."""
    if attempt.sleep is None or attempt.sleep.phase is not SleepPhase.ASLEEP:
        return unchanged(case)
    return _with_phase(case, attempt, replace(attempt.sleep, phase=SleepPhase.WAITING))


def delay_wake(
    case: AttemptCase, attempt: Attempt, happening: WakeDelayed, facts: TransitionContext
) -> TransitionResult:
    """Record what a replica waits for."""
    sleep = attempt.sleep
    if sleep is None or sleep.phase is not SleepPhase.WAITING or sleep.why == happening.why:
        return unchanged(case)
    line = history_line(case, facts, "wake_delayed", f"waits to wake: {happening.why}")
    return replace(_with_phase(case, attempt, replace(sleep, why=happening.why)), history=(line,))


def wake(
    case: AttemptCase, attempt: Attempt, _happening: DevicesRegained, facts: TransitionContext
) -> TransitionResult:
    """Grant its devices again, then run its wake hook."""
    sleep = attempt.sleep
    if sleep is None or sleep.phase is not SleepPhase.WAITING:
        return unchanged(case)
    awake = replace(attempt, allocation=attempt.full_allocation, asleep_s=attempt.sleep_s(facts.now_s))
    after = _next_hook(awake, SleepPhase.WAKING)
    line = history_line(case, facts, "waking", f"holds {_devices_text(after)} again; wakes")
    return TransitionResult(job=case.job, attempt=after, commands=gang_commands.sleep_hook(after), history=(line,))


def answers(attempt: Attempt, happening: SleepHookEnded) -> bool:
    """Whether this is the answer to the hook that runs, and not a late one to an earlier hook."""
    sleep = attempt.sleep
    if sleep is None or not attempt.runs_hook or happening.turn != attempt.sleep_turn:
        return False
    if happening.node_id != attempt.allocation.grants[0].node_id:
        return False
    return happening.sleep is (sleep.phase is SleepPhase.FALLING_ASLEEP)


def finish_hook(
    case: AttemptCase, attempt: Attempt, happening: SleepHookEnded, facts: TransitionContext
) -> TransitionResult:
    """Give the devices back after a sleep hook, or be awake after a wake hook that succeeded.

    A program whose sleep hook failed may be half asleep: its wake hook runs, and it keeps its devices.
    """
    if happening.sleep and happening.why:
        after = _next_hook(replace(attempt, sleep_refusal=happening.why), SleepPhase.WAKING)
        line = history_line(case, facts, "sleep_failed", f"stays awake and keeps its devices: {happening.why}")
        return TransitionResult(job=case.job, attempt=after, commands=gang_commands.sleep_hook(after), history=(line,))
    if happening.sleep:
        line = history_line(
            case, facts, "asleep", f"asleep: gave back {_devices_text(attempt)}; keeps its CPUs and memory"
        )
        grants = attempt.allocation.grants
        after = replace(
            attempt,
            allocation=replace(attempt.allocation, grants=tuple(replace(grant, devices=()) for grant in grants)),
            sleep=Sleep(phase=SleepPhase.ASLEEP, devices=tuple(grant.devices for grant in grants), since_s=facts.now_s),
            sleep_refusal="",
        )
        return TransitionResult(job=case.job, attempt=after, history=(line,))
    after = replace(attempt, sleep=None)
    lines = (endpoint_line(case, after, facts, ""),) if after.serving else ()
    return TransitionResult(
        job=case.job, attempt=after, history=(history_line(case, facts, "awake", "awake again"), *lines)
    )


def _next_hook(attempt: Attempt, phase: SleepPhase) -> Attempt:
    return replace(attempt, sleep=Sleep(phase=phase), sleep_turn=attempt.sleep_turn + 1)


def _with_phase(case: AttemptCase, attempt: Attempt, sleep: Sleep) -> TransitionResult:
    return TransitionResult(job=case.job, attempt=replace(attempt, sleep=sleep))


def _devices_text(attempt: Attempt) -> str:
    """The devices that it holds: "n0:0,1, n1:0"."""
    return ", ".join(f"{grant.node_id}:{','.join(map(str, grant.devices))}" for grant in attempt.allocation.grants)
