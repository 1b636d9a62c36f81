"""The trials of a sweep in Optuna: chosen one by one, compared at the rungs of ASHA, and closed with their result. The only module that imports Optuna.

Each trial number has a sampler of its own, seeded by the seed of the sweep and the number. So a sweep that was interrupted goes on with the
same values as one that was not, for grid and random; TPE also looks at the results so far.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from phalanx.core.errors import BadRequest
from phalanx.sweep.definition import SweepDefinition

if TYPE_CHECKING:
    import optuna
    from optuna.trial import Trial

TrialState = Literal["running", "complete", "stopped", "failed"]
_STUDY: Final = "sweep"
_JOB, _WHY, _STEPS = "job", "why", "min_steps"  # user attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial as stored. `values`: as the program receives them; `reports`: metric by step; `value`: the last one known."""

    number: int
    state: TrialState
    values: Mapping[str, str]
    numbers: Mapping[str, object]
    job_id: str = ""
    value: float | None = None
    reports: Mapping[int, float]
    why: str = ""


class SweepStudy:
    """The trials of one sweep.

    Args:
        definition: of the sweep.
        journal: file that keeps the trials; the caller holds the lock of the sweep. None keeps them in memory.
    """

    def __init__(self, definition: SweepDefinition, journal: str | None) -> None:
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if journal is not None:
            _cut_torn_line(journal)
        self._definition = definition
        self._study = optuna.create_study(
            study_name=_STUDY,
            storage=None if journal is None else _journal_storage(journal),
            direction="maximize" if definition.maximize else "minimize",
            sampler=_sampler(definition, 0),
            load_if_exists=True,
        )
        self._trials: dict[int, Trial] = {}
        self._set_pruner(definition.min_steps or int(self._study.user_attrs.get(_STEPS, 0)))

    @property
    def min_steps(self) -> int:
        """The step of the first rung; 0 while it is not known."""
        return self._min_steps

    def set_min_steps(self, steps: int) -> None:
        """Set the step of the first rung, once it is known."""
        self._study.set_user_attr(_STEPS, steps)
        self._set_pruner(steps)

    def resume_trials(self) -> list[TrialRecord]:
        """Return the trials that had not ended when the last process ended. One without all its values is given the missing ones."""
        optuna = _optuna()
        for frozen in self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
            self._study.sampler = _sampler(self._definition, frozen.number)
            self._trials[frozen.number] = self._suggest(optuna.trial.Trial(self._study, frozen._trial_id))  # noqa: SLF001  # `ask` does the same
        return [one for one in self.trials() if one.state == "running"]

    def ask(self) -> TrialRecord:
        """Begin the next trial. It is stored when this returns."""
        self._study.sampler = _sampler(self._definition, self.count)
        trial = self._suggest(self._study.ask())
        self._trials[trial.number] = trial
        return self.trial(trial.number)

    def set_job(self, number: int, job_id: str) -> None:
        """Store the job of a trial."""
        self._trials[number].set_user_attr(_JOB, job_id)

    def report(self, number: int, step: int, value: float) -> bool:
        """Store what a trial reported at the step of a rung; return whether ASHA stops it there."""
        trial = self._trials[number]
        trial.report(value, step)
        return trial.should_prune()

    def tell(self, number: int, state: TrialState, value: float | None = None, why: str = "") -> None:
        """End a trial."""
        ended = _optuna().trial.TrialState
        states = {"complete": ended.COMPLETE, "stopped": ended.PRUNED, "failed": ended.FAIL}
        if why:
            self._trials[number].set_user_attr(_WHY, why)
        self._study.tell(self._trials.pop(number), value if state == "complete" else None, state=states[state])

    @property
    def count(self) -> int:
        """The number of trials that were begun."""
        return len(self._study.get_trials(deepcopy=False))

    def trial(self, number: int) -> TrialRecord:
        """Return one trial."""
        return self._record(self._study.get_trials(deepcopy=False)[number])

    def trials(self) -> list[TrialRecord]:
        """Return all trials by number."""
        return [self._record(one) for one in self._study.get_trials(deepcopy=False)]

    def _suggest(self, trial: Trial) -> Trial:
        for one in self._definition.parameters:
            if one.choices or self._definition.search == "grid":
                trial.suggest_categorical(one.name, one.choices or one.grid_values())
            elif one.whole:
                trial.suggest_int(one.name, int(one.low), int(one.high), log=one.log)
            else:
                trial.suggest_float(one.name, one.low, one.high, log=one.log)
        return trial

    def _set_pruner(self, min_steps: int) -> None:
        optuna = _optuna()
        self._min_steps = min_steps
        self._study.pruner = (
            optuna.pruners.SuccessiveHalvingPruner(min_resource=min_steps, reduction_factor=self._definition.eta)
            if self._definition.asha and min_steps
            else optuna.pruners.NopPruner()
        )

    def _record(self, found: optuna.trial.FrozenTrial) -> TrialRecord:
        states: dict[str, TrialState] = {"COMPLETE": "complete", "PRUNED": "stopped", "FAIL": "failed"}
        reports = found.intermediate_values
        # Optuna's value of a pruned trial is its last report.
        value = found.value if found.value is not None else reports[max(reports)] if reports else None
        return TrialRecord(
            number=found.number,
            state=states.get(found.state.name, "running"),
            values={
                one.name: one.text(found.params[one.name])
                for one in self._definition.parameters
                if one.name in found.params
            },
            numbers=dict(found.params),
            job_id=found.user_attrs.get(_JOB, ""),
            value=value,
            reports=dict(reports),
            why=found.user_attrs.get(_WHY, ""),
        )


def read_trials(definition: SweepDefinition, journal: str) -> list[TrialRecord]:
    """Return the trials of a sweep on which another process may work; changes nothing."""
    study = SweepStudy(definition, None)
    if os.path.exists(journal):
        optuna = _optuna()
        with contextlib.suppress(KeyError):  # no trial was begun yet
            study._study = optuna.load_study(study_name=_STUDY, storage=_journal_storage(journal))  # noqa: SLF001  # of this module
    return study.trials()


def _sampler(definition: SweepDefinition, number: int) -> Any:
    samplers = _optuna().samplers
    seed = (definition.seed * 1_000_003 + number) % 2**32
    match definition.search:
        case "grid":  # shuffled by the seed of the sweep, and taken in the order of the trials
            grid = {one.name: one.grid_values() for one in definition.parameters}
            return _grid_sampler()(grid, seed=definition.seed)
        case "tpe":
            return samplers.TPESampler(seed=seed, constant_liar=True)
        case _:
            return samplers.RandomSampler(seed=seed)


def _grid_sampler() -> Any:
    class Grid(_optuna().samplers.GridSampler):  # type: ignore[misc]  # the base is loaded when it is needed
        def after_trial(self, *_: object) -> None:
            """Do nothing: Optuna's would stop a loop of its own after the last point, and this is no such loop."""

    return Grid


class _HeldLock:
    """The sweep's own lock is held already, and a kill releases it; Optuna's would delay the next process by 30 s."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _journal_storage(path: str) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(path, lock_obj=_HeldLock()))  # type: ignore[arg-type]  # Optuna calls these two methods


def _cut_torn_line(path: str) -> None:
    """Remove a last line that a kill or a full disk left incomplete: what it says was not acted on yet."""
    if not os.path.exists(path):
        return
    with open(path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise BadRequest("a sweep needs Optuna", hint="pip install '.[sweep]' in the checkout") from error
    return optuna
