"""Job and queue files that somebody made to harm: each is refused in one line, by its size or by what it holds, and little memory is taken."""

import tracemalloc

import pytest

from phalanx.cli.jobs.request.job_file import FILE_BYTES_MAX, parse_job_file
from phalanx.core.errors import BadFile
from phalanx.user_files.queue_file import parse_queue_file

LONG = FILE_BYTES_MAX - 100
HOSTILE = {
    "laughs": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    "an alias of itself": "env: &a {x: *a}",
    "many aliases": "env: &e {A: b}\n" + "".join(f"k{number}: *e\n" for number in range(10_000)),
    "many anchors": "".join(f"&a{number} " for number in range(20_000)),
    "deep lists": "run: " + "[" * LONG,
    "deep tables": "run: " + "{a: " * (LONG // 4),
    "deep blocks": "".join(" " * depth + "a:\n" for depth in range(700)),
    "dashes": "- " * (LONG // 2),
    "question marks": "? " * (LONG // 2),
    "a tag that calls": "run: !!python/object/apply:os.system [id]\n",
    "a tag of one's own": "%TAG ! tag:x,2000:\n---\nrun: !x y\n",
    "a binary": "run: !!binary aWQ=\n",
    "directives": "%YAML 1.2\n" * (LONG // 10),
    "two keys of one name": "run: a\nrun: b\n",
    "a merge": "<<: {run: x}\n",
    "many keys": "".join(f"k{number}: 1\n" for number in range(20_000)),
    "many values in one": "env:\n" + "".join(f"  K{number}: 1\n" for number in range(20_000)),
    "two documents": "run: a\n---\nrun: b\n",
    "many documents": "---\n" * (LONG // 4),
    "blanks": " \n" * (LONG // 2),
    "tabs": "\t" * LONG,
    "comments": "#\n" * (LONG // 2),
    "colons": ":" * LONG,
    "words and a colon": "a " * (LONG // 2) + ": b",
    "commas": "[" + "," * LONG + "]",
    "a NUL": "run: a\0b\n",
    "an escape": "run: \x1b[31m\n",
    "an open quote": 'run: "' + "x" * LONG,
    "quotes": "run: '" + "''" * (LONG // 2),
    "percents": "%" * LONG,
    "a number for a table": "env: 7\n",
    "a table for a number": "gpus: {a: b}\n",
}


@pytest.mark.parametrize("parse", [parse_job_file, parse_queue_file])
@pytest.mark.parametrize("why", HOSTILE)
def test_is_refused_in_one_printable_line(why, parse):
    with pytest.raises(BadFile) as refused:
        parse(HOSTILE[why], path="f.yaml")
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 500


@pytest.mark.slow
@pytest.mark.parametrize("why", ["laughs", "many aliases", "deep lists", "many keys", "commas"])
def test_takes_little_memory(why):
    tracemalloc.start()
    with pytest.raises(BadFile):
        parse_job_file(HOSTILE[why], path="f.yaml")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 32 << 20


@pytest.mark.parametrize(
    "value", ["9" * 100_000, "-" + "9" * 19, "0x" + "f" * 64, "1e" + "9" * 400, ".inf", "1_000", "0o777"]
)
def test_a_number_past_all_numbers_stays_the_words_it_was_typed_as(value):
    """Whoever reads the key judges it as what was typed; nothing is computed from it here."""
    assert parse_job_file(f"gpus: {value}\n", path="f.yaml").mapping == {"gpus": value}
