"""The shape of a job in words: its nodes and their GPUs."""

from __future__ import annotations

from collections.abc import Sequence


def shape_note(devices_by_node: Sequence[int]) -> str:
    """`2 nodes x 8 = 16 GPUs`; uneven ones as `2 nodes, 3 + 1 = 4 GPUs`; `0 GPUs: CPUs of 1 node`."""
    nodes, total = len(devices_by_node), sum(devices_by_node)
    if total == 0:
        return f"0 GPUs: CPUs of {nodes} {plural('node', nodes)}"
    if len(set(devices_by_node)) == 1:
        return f"{nodes} {plural('node', nodes)} x {devices_by_node[0]} = {total} {plural('GPU', total)}"
    return f"{nodes} nodes, {' + '.join(map(str, devices_by_node))} = {total} GPUs"


def plural(word: str, count: int) -> str:
    """Return the word, with an s unless there is one."""
    return word if count == 1 else word + "s"
