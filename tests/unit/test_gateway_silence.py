"""Answers that are silent for too long end; those whose client is slow do not."""

import aiohttp
import pytest

from phalanx.gateway.silence import WatchedAnswer


class Content:
    """The reader of an answer, as far as it is watched."""

    def __init__(self):
        self.error = None

    def set_exception(self, error):
        self.error = error


@pytest.mark.parametrize(
    ("steps", "ends_s"),
    [
        ([(0, "wait"), (5, "wait"), (10, "wait")], 10),
        ([(0, "wait"), (9, "chunk"), (18, "wait"), (19, "wait")], 19),
        ([(0, "wait"), (9, "slow"), (40, "slow"), (41, "wait"), (50, "wait"), (51, "wait")], 50),
        ([(number, "chunk") for number in range(0, 100, 9)], None),
    ],
)
def test_silence_counts_while_the_engine_is_waited_for(steps, ends_s):
    content = Content()
    answer = WatchedAnswer(content)  # type: ignore[arg-type]
    for now_s, what in steps:
        answer.chunks += what == "chunk"
        answer.reading = what != "slow"
        answer.look(float(now_s), 10.0)
        assert (content.error is not None) == (ends_s is not None and now_s >= ends_s), now_s
    assert content.error is None or isinstance(content.error, aiohttp.SocketTimeoutError)
