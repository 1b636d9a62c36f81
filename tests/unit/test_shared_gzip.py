"""Gzip of streams with shared parts: each reader gets a valid stream of its own, from wherever it begins."""

import gzip
import zlib

from phalanx.api.live import shared_gzip
from phalanx.api.live.shared_gzip import GzipStream

EVENTS = [f"event: delta\ndata: {number} {'x' * number}\n\n".encode() for number in range(40)]


def test_each_reader_gets_its_events_as_they_come_and_a_valid_end():
    for begin in (0, 7, 39):
        stream, reader, got = GzipStream(), zlib.decompressobj(31), b""
        for event in EVENTS[begin:]:
            got += reader.decompress(stream.encode(event))
            assert got.endswith(event)  # nothing of it is held back
        assert not reader.eof
        got += reader.decompress(stream.encode(b"", last=True))
        assert reader.eof
        assert got == b"".join(EVENTS[begin:])
    whole = GzipStream()
    assert (
        gzip.decompress(b"".join([whole.encode(EVENTS[0]), whole.encode(EVENTS[1], last=True)]))
        == EVENTS[0] + EVENTS[1]
    )


def test_an_event_is_compressed_once_for_all_readers():
    shared_gzip._deflated.cache_clear()
    readers = [GzipStream() for _ in range(50)]
    for event in EVENTS[:5]:
        assert len({reader.encode(event) for reader in readers}) == 1
    assert shared_gzip._deflated.cache_info().misses == 5
