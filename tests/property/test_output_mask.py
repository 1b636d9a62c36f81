"""The masks of output: however a text is cut into pieces, no value comes through, and everything else does."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.node.logic.output_mask import OutputMasker

LETTERS = st.text("ab\n", max_size=60)
VALUES = st.lists(
    st.text("ab\n", min_size=8, max_size=14).filter(lambda one: len(one.strip()) >= 8), min_size=1, max_size=3
)


@given(values=VALUES, text=LETTERS, cuts=st.lists(st.integers(0, 200)), data=st.data())
def test_pieces_are_masked_as_the_whole(values, text, cuts, data):
    words = data.draw(st.lists(st.sampled_from([*values, text, values[0][:-1]]), max_size=6))
    whole = "".join(words).encode()
    masker = OutputMasker(values)
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {len(whole)})
    pieces = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    written = b"".join([*(masker.feed(piece) for piece in pieces), masker.finish()])
    assert written == masker.mask(whole)
    for value in values:
        for line in (value, *value.splitlines()):
            assert len(line.strip()) < 8 or line.strip().encode() not in written
    assert whole.replace(b"a", b"").replace(b"b", b"").count(b"\n") >= written.count(b"\n")


def test_what_is_no_value_comes_through_unchanged():
    masker = OutputMasker(["secret-value"])
    assert masker.feed(b"secret-valu") == b""
    assert masker.feed(b"able s") == b"secret-valuable "
    assert masker.finish() == b"s"
    assert masker.feed(bytes(range(256))) == bytes(range(256))


def test_a_value_at_the_end_of_a_piece_is_masked_at_once():
    masker = OutputMasker(["secret-value", "secret-value-2"])
    assert masker.feed(b"x secret-value") == b"x "
    assert masker.feed(b"-2\n") == b"***\n"
    assert masker.feed(b"secret-value\n") == b"***\n"
