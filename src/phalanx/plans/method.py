"""Parse `--method`: what is trained, by which objective, and what the model writes for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.training_task import Objective, TrainingMethod
from phalanx.plans.amounts import parse_count
from phalanx.plans.option_words import flag_of

GROUP_DEFAULT: Final = 8  # answers to a prompt: trl's num_generations
UPDATES_DEFAULT: Final = 1  # on policy: verl and NeMo RL take four in their examples
_WRITING: Final = ("prompt_tokens", "answer_tokens", "group", "updates")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswers:
    """What is written for each prompt: `group` answers. `prompt` and `answer` are mean tokens, `longest` is the limit of an answer.

    `updates`: optimizer steps in which the answers of one step are used.
    """

    prompt: int
    answer: int
    longest: int
    group: int
    updates: int = UPDATES_DEFAULT


def method_words() -> tuple[str, ...]:
    """Return all values of `--method`."""
    return tuple(method_word(objective, method) for objective in Objective for method in TrainingMethod)


def method_word(objective: Objective, method: TrainingMethod) -> str:
    """Return the value of `--method` for an objective and what it trains."""
    if objective is Objective.CROSS_ENTROPY:
        return method.value
    return objective.value if method is TrainingMethod.FULL else f"{objective.value}-{method.value}"


def parse_method(text: object) -> tuple[Objective, TrainingMethod]:
    """Return the objective, and what is trained.

    Raises:
        BadRequest: unknown method.
    """
    word = str(text).strip().lower().replace("_", "-")
    for objective in Objective:
        for method in TrainingMethod:
            if word == method_word(objective, method):
                return objective, method
    known = method_words()
    raise BadRequest(f"method: {str(text)[:60]!r} must be one of {', '.join(known)}", hint=suggestion(word, known))


def parse_answers(options: Mapping[str, Any], objective: Objective, seq: int) -> WrittenAnswers | None:
    """Return what the model writes for GRPO; None for other objectives.

    `seq` is the limit of a prompt with its answer; unless stated, a prompt has an eighth of it, and a mean answer half of the rest.

    Raises:
        BadRequest: a number is not positive, they exceed the sequence, or belong to another method.
    """
    given = {name: options[name] for name in _WRITING if options.get(name) is not None}
    if objective is not Objective.GRPO:
        for name in given:
            raise BadRequest(f"{flag_of(name)} needs method grpo", hint="add --method grpo")
        return None
    counts = {name: parse_count(text, what=flag_of(name)) for name, text in given.items()}
    prompt = counts.get("prompt_tokens", max(1, seq // 8))
    longest = seq - prompt
    answer = counts.get("answer_tokens", max(1, longest // 2))
    if answer > longest:
        raise BadRequest(
            f"seq: a prompt of {prompt} tokens and a mean answer of {answer} are more than a sequence of {seq}",
            hint=f"--seq {prompt + 2 * answer}",
        )
    return WrittenAnswers(
        prompt=prompt,
        answer=answer,
        longest=longest,
        group=counts.get("group", GROUP_DEFAULT),
        updates=counts.get("updates", UPDATES_DEFAULT),
    )
