"""The request for a plan, as `phalanx plan` takes it; its reply is what `phalanx plan --json` prints."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

TOP_MAX = 100
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Word = Annotated[str, msgspec.Meta(max_length=200)]


class PlanBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The question. Amounts are texts in the command line's grammar ("300B", "4xh100:8"); absent ones take their defaults.

    Attributes:
        model: a name of the table, or sizes ("layers=32,hidden=4096,heads=32,vocab=32000"). Files are not read.
        gpus: the GPUs; with `fleet` the part of this fleet to use.
        fleet: "here" to plan on the fleet of this head.
        top: layouts to return.
    """

    model: Text
    gpus: Word | None = None
    fleet: Literal["here"] | None = None
    seq: Word | None = None
    mean_length: Word | None = None
    packing: Word | None = None
    global_batch: Word | None = None
    tokens: Word | None = None
    method: Word = "full"
    prompt_tokens: Word | None = None
    answer_tokens: Word | None = None
    group: Word | None = None
    updates: Word | None = None
    optimizer: Word = "adamw"
    offload: Word = "none"
    precision: Word | None = None
    stack: Word | None = None
    cuda_graphs: Word | None = None
    host_memory: Word | None = None
    instance: Word | None = None
    network: Word | None = None
    price: Word | None = None
    price_date: Word | None = None
    price_kind: Word | None = None
    layout: Text | None = None
    top: Annotated[int, msgspec.Meta(ge=1, le=TOP_MAX)] = 5
