"""Types of the options that take amounts: tokens, positions, sequences and dollars."""

from __future__ import annotations

from typing import Final

from phalanx.cli.option_types import GrammarType
from phalanx.plans.amounts import parse_count, parse_tokens, parse_usd
from phalanx.plans.gpu_words import parse_gpus_or_models

TOKENS: Final = GrammarType("TOKENS", parse_tokens)
SEQ: Final = GrammarType("N", lambda text: parse_count(text, what="seq"))
LENGTH: Final = GrammarType("N", lambda text: parse_count(text, what="mean-length"))
BATCH: Final = GrammarType("N", lambda text: parse_count(text, what="global-batch"))
USD: Final = GrammarType("USD", parse_usd)
PLANNED_GPUS: Final = GrammarType("GPUS", parse_gpus_or_models)
