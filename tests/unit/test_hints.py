"""Hints are codes below the command line; the command line has words for each, and no other package uses its words."""

import ast
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from string import Formatter
from types import SimpleNamespace

import click
import pytest

import phalanx.core
from phalanx.api.http.errors import error_response
from phalanx.cli.errors import print_error
from phalanx.cli.jobs.show import _history
from phalanx.cli.jobs.why import with_commands
from phalanx.cli.root import COMMANDS, main
from phalanx.cli.root import phalanx as root
from phalanx.cli.terminal import Terminal
from phalanx.client.connection.transport import error_from_reply
from phalanx.core.errors import NotFound
from phalanx.core.hints import Hint, HintCode, parse_hint
from phalanx.core.ids import JobId, NodeId
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.states import JobState
from phalanx.web.command_hints import RENDERINGS, render_hint
from phalanx.wire.why import SuggestedChangeView, WhyReply

SOURCE = Path(phalanx.core.__file__).parents[1]
BELOW_THE_COMMAND_LINE = ("core", "controller", "store", "api", "client", "engines", "planner")
LABELS = {"core/access/node_tokens.py"}  # labels that keys are derived from
OPTIONS_OF_OTHERS = {  # of sbatch and of programs that the engines start
    "core/work/sbatch_scripts/sbatch.py",
    "core/work/sbatch_scripts/het_components.py",
    "core/work/sbatch_scripts/sbatch_job.py",
    "engines/local/engine.py",
    "engines/ray/driver.py",
    "engines/ray/engine.py",
    "engines/ray/render.py",
    "engines/slurm/render.py",
}
# An engine declares its options of `phalanx up`, checks them and names them in its refusals.
OPTIONS_OF_ENGINES = {
    f"engines/{engine}/{file}.py" for engine in ("kubernetes", "ray", "slurm") for file in ("engine_type", "head_setup")
} | {
    "engines/kubernetes/cluster_pools.py",  # a provider, which refuses in the words of `pools add`
    "engines/kubernetes/head_manifests.py",  # the command line of a head in the cluster
}
MENTION = re.compile(r"\bphalanx ([a-z][a-z-]*(?: [a-z]+)?)([^;,`]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
UPDATED_KEYS = ("begin", "time", "queue", "priority")
SUBMITTED_KEYS = (*UPDATED_KEYS, "gpus", "gpus_per_node", "prefer")


def command_of(words):
    """The command that the words begin with."""
    found = root.get_command(click.Context(root), words.split()[0])
    for word in words.split()[1:]:
        found = found.commands.get(word, found) if isinstance(found, click.Group) else found
    return found


def options_of(command):
    return {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}


def every_option():
    found, left = options_of(root), [root.get_command(click.Context(root), name) for name in COMMANDS]
    while left:
        command = left.pop()
        found |= options_of(command)
        left += command.commands.values() if isinstance(command, click.Group) else ()
    return found


def fields(text):
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def texts(path):
    """String constants of a module without its docstrings."""
    text = path.read_text(encoding="utf-8")
    if "--" not in text and not re.search(r"phalanx[ \"']", text):
        return []  # neither a command nor an option: not worth a parse
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]


@pytest.mark.parametrize("code", HintCode, ids=lambda code: code.value)
def test_command_line_has_words_for_every_hint(code):
    known = fields(code.plain) | ({"option"} if "key" in fields(code.plain) else set())
    assert fields(RENDERINGS[code]) <= known


@pytest.mark.parametrize("code", HintCode, ids=lambda code: code.value)
def test_commands_and_options_in_its_words_exist(code):
    words = RENDERINGS[code]
    named = set()
    for mention, rest in MENTION.findall(words):
        command = command_of(mention)
        assert command is not None, mention
        options = set(OPTION.findall(rest.partition(" -- ")[0]))
        assert options <= options_of(command), mention
        named |= options
    assert set(OPTION.findall(words)) - named <= every_option()


def test_keys_in_hints_are_options():
    for key in SUBMITTED_KEYS:
        words = render_hint(Hint(HintCode.SUBMIT_WITH, key=key, value="1"))
        assert set(OPTION.findall(words)) <= options_of(command_of("submit"))
    for key in UPDATED_KEYS:
        words = render_hint(Hint(HintCode.UPDATE_JOB, job=7, key=key, value="1"))
        assert set(OPTION.findall(words)) <= options_of(command_of("update"))


@pytest.mark.parametrize("room", BELOW_THE_COMMAND_LINE)
def test_no_text_names_a_command_or_an_option(room):
    options = every_option()
    named = []
    for path in (SOURCE / room).rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        for text in texts(path):
            commands = (
                []
                if name in LABELS | OPTIONS_OF_ENGINES
                else [word for word in MENTION.findall(text) if word[0].split()[0] in COMMANDS]
            )
            flags = [] if name in OPTIONS_OF_OTHERS | OPTIONS_OF_ENGINES else options.intersection(OPTION.findall(text))
            if commands or flags:
                named.append((name, text))
    assert named == []


def test_hint_is_its_plain_text_and_keeps_its_code():
    hint = Hint(HintCode.SHOW_JOB, job=7)
    assert hint == "see job 7"
    copied = pickle.loads(pickle.dumps(hint))
    assert (copied, copied.code, copied.arguments) == (hint, hint.code, hint.arguments)
    assert render_hint(hint) == "phalanx show 7"
    assert render_hint("submit it again") == "submit it again"


def test_error_travels_with_its_hint(capsys):
    error = NotFound("no job 7", hint=Hint(HintCode.LIST_JOBS))
    body = bytes(error_response(error).body)
    assert json.loads(body)["error"]["hint_code"] == "list-jobs"
    received = error_from_reply(404, body, "GET /v1/jobs/7")
    assert isinstance(received.hint, Hint)
    print_error(received.message, received.hint, received.exit_code)
    assert capsys.readouterr().err == "phalanx: error: no job 7 (phalanx ps -a lists them)\n"


def test_history_of_a_hang_names_the_command_for_its_stacks():
    hung = HistoryLine(seq=1, at_s=0.0, kind="hung", text="rank 2 hangs", job_id=JobId("7"))
    report = replace(hung, seq=0, node_id=NodeId("n1"))
    told = _history(
        [report, hung], Terminal(width=120, height=40, interactive=False, colour=False, blocks=True), whole=True
    )
    assert [line.partition("rank 2 hangs")[2] for line in told] == ["", "; stacks: phalanx logs 7 --stacks"]


def test_changes_that_start_a_job_are_shown_with_their_commands():
    change = SuggestedChangeView(
        kind="queue",
        text="use queue red",
        hint_code="update-job",
        hint_args={"job": "7", "key": "queue", "value": "red"},
    )
    found = WhyReply(job_id=JobId("7"), state=JobState.PENDING, now_s=0.0, headline="waits", changes=[change])
    assert [one.command for one in with_commands(found).changes] == ["phalanx update 7 --queue red"]


@pytest.mark.parametrize(
    ("code", "arguments"), [(None, None), ("", {}), ("of-a-newer-head", {}), ("show-job", {"work": "7"})]
)
def test_hint_without_a_known_code_is_its_text(code, arguments):
    assert parse_hint("look there", code, arguments) == "look there"
    assert not isinstance(parse_hint("look there", code, arguments), Hint)


def test_a_pool_that_exists_is_changed_by_another_command(monkeypatch, capsys):
    head = SimpleNamespace(pools=lambda: [SimpleNamespace(id="burst")])
    monkeypatch.setattr("phalanx.cli.cluster.pools.connect", lambda: head)
    assert main(["pools", "add", "burst", "--provider", "virtual", "--node", "1", "--max", "1", "--price", "1/h"])
    assert (
        "pool burst exists already (change it with phalanx pools set burst, or remove it first)"
        in capsys.readouterr().err
    )
