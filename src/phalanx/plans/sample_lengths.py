"""Parse `--mean-length` and `--packing`: how long training samples are, and how they are put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.sequence_lengths import SequenceBatching
from phalanx.planner.cost.training_task import Objective
from phalanx.planner.search.sample_batches import SampleBatches
from phalanx.plans.amounts import parse_count


def parse_samples(options: Mapping[str, Any], objective: Objective, seq: int) -> SampleBatches | None:
    """Return the lengths of the samples; None if all have `seq` tokens, as in pretraining.

    Raises:
        BadRequest: an unknown word, a mean above the sequence, or a method that cannot have them.
    """
    length, packing = options.get("mean_length"), options.get("packing")
    if length is None:
        if packing is not None:
            raise BadRequest("packing needs the mean length of a sample", hint="add --mean-length 500")
        return None
    if objective is Objective.GRPO:
        raise BadRequest("mean-length does not belong to method grpo", hint="give --in and --out")
    mean = parse_count(length, what="mean-length")
    if mean > seq:
        raise BadRequest(
            f"mean-length: samples of {mean} tokens are longer than a sequence of {seq}", hint=f"--seq {mean}"
        )
    batching = _batching(packing)
    if batching is SequenceBatching.PACKED and objective is Objective.DPO:
        raise BadRequest("packing: pairs of answers are not packed", hint="--packing unpadded")
    return SampleBatches(mean, seq, batching)


def _batching(text: object) -> SequenceBatching:
    if text is None:
        return SequenceBatching.PADDED
    word = str(text).strip().lower()
    if word not in set(SequenceBatching):
        hint = suggestion(word, list(SequenceBatching))
        raise BadRequest(f"packing: {str(text)[:60]!r} must be one of {', '.join(SequenceBatching)}", hint=hint)
    return SequenceBatching(word)
