"""The values of a plan's options, for command lines and forms. Plain words: a command shows its help without loading the planner."""

from __future__ import annotations

from typing import Final

METHODS: Final = ("full", "lora", "qlora", "dpo", "dpo-lora", "dpo-qlora", "grpo", "grpo-lora", "grpo-qlora")
OPTIMIZERS: Final = ("adamw", "adamw8bit", "adamw4bit", "paged-adamw", "paged-adamw8bit")
OFFLOADS: Final = ("none", "optimizer", "parameters")
PACKINGS: Final = ("padded", "packed", "unpadded")
GRAPHS: Final = ("on", "off")
