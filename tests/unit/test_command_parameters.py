"""Another value for a parameter of a command, in words and in shell text."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.work.job_file.command_parameters import parameter_names, with_parameter


@pytest.mark.parametrize(
    ("words", "name", "after"),
    [
        ("python a.py --lr 1e-3 --n 4", "lr", "python a.py --lr NEW --n 4"),
        ("python a.py --lr=1e-3", "lr", "python a.py --lr=NEW"),
        ("python a.py lr=1e-3 x=2", "lr", "python a.py lr=NEW x=2"),
        ("python a.py +opt.lr=1 ++opt.lr=2", "opt.lr", "python a.py +opt.lr=NEW ++opt.lr=NEW"),
        ("python a.py --learning-rate 1", "learning_rate", "python a.py --learning-rate NEW"),
        ("python a.py -n 4 --lr -0.5", "lr", "python a.py -n 4 --lr NEW"),
        ("python a.py -n 4", "n", "python a.py -n NEW"),
        ("env LR=3 python a.py", "LR", "env LR=NEW python a.py"),
        ("python a.py --fp16 --lr 1", "fp16", None),
        ("python a.py --fp16", "fp16", None),
        ("python a.py --lrx 1 xlr=2 clr 3", "lr", None),
    ],
)
def test_words(words, name, after):
    found = with_parameter(words.split(), "", name, "NEW")
    assert (" ".join(found.argv), bool(found.changes)) == (after or words, after is not None)


def test_a_value_of_a_word_may_be_anything():
    assert with_parameter(["a", "--m", "x"], "", "m", "b c'").argv == ("a", "--m", "b c'")


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("LR=1 python a.py --lr 2 \\\n  --n 3 && b --lr=3", "LR=1 python a.py --lr NEW \\\n  --n 3 && b --lr=NEW"),
        ("a --lr \\\n  2\n", "a --lr \\\n  NEW\n"),
        ("lr=1; a $lr", "lr=NEW; a $lr"),
        ("export lr=\na", "export lr=NEW\na"),
        ("a --lr '1 2' -x", "a --lr NEW -x"),
        ('a --lr "$X" | tee log', "a --lr NEW | tee log"),
        ("bash -c 'a --lr 1'", "bash -c 'a --lr NEW'"),
        ("#SBATCH --lr=1\n  # a --lr 2\na --lr 3", "#SBATCH --lr=1\n  # a --lr 2\na --lr NEW"),
        ("a --lr --x; b --lr\nc", None),
        ("a --xlr 1 --lr-2 1 lrs=1", None),
    ],
)
def test_shell_text(text, after):
    found = with_parameter((), text, "lr", "NEW")
    assert (found.script, bool(found.changes)) == (after or text, after is not None)


def test_a_shell_among_the_words_is_read_too():
    found = with_parameter(["bash", "-lc", "cd x && python a.py --lr 1"], "", "lr", "2")
    assert found.argv == ("bash", "-lc", "cd x && python a.py --lr 2")
    assert found.changes == (("--lr 1", "--lr 2"),)


def test_a_value_that_needs_quotes_gets_them_or_is_refused_inside_quotes():
    assert with_parameter((), "a --m x; b", "m", "u v").script == "a --m 'u v'; b"
    with pytest.raises(BadRequest, match="inside quotes"):
        with_parameter((), "bash -c 'a --m x'", "m", "u v")


def test_names_of_parameters_for_the_hint():
    words = ["python", "a.py", "--lr", "1", "--fp16", "--n=4", "+opt.x=1", "y"]
    assert parameter_names(words, "") == ["lr", "n", "opt.x"]
    assert parameter_names((), "# a --no 1\nX=1 a --lr 1 --fp16 --n=4 \\\n --m 2") == ["X", "lr", "n", "m"]
