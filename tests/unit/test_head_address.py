"""A supervisor looks for the head that leads: by its own machine's file, by what leaders told it, by a standby's word."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from time import monotonic

import pytest

from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess, HeadConnection, HeadUnavailable


def test_silent_head_is_left_for_the_next_and_the_ring_comes_round():
    address = HeadAddress("https://a:1,https://b:1", None)
    assert address.url == "https://a:1"
    address.switch_head("https://a:1")
    assert address.url == "https://b:1"
    address.switch_head("https://b:1")
    assert address.url == "https://a:1"


def test_second_thread_that_found_the_same_silence_moves_nobody():
    address = HeadAddress("https://a:1,https://b:1", None)
    address.switch_head("https://a:1")
    address.switch_head("https://a:1")
    assert address.url == "https://b:1"


def test_standby_is_believed_about_the_leader():
    address = HeadAddress("https://a:1,https://b:1", None)
    address.follow_referral("https://a:1", "https://c:1")
    assert address.url == "https://c:1"


def test_standby_is_not_believed_about_a_leader_that_was_silent_just_now():
    address = HeadAddress("https://a:1,https://b:1,https://c:1", None)
    address.switch_head("https://a:1")
    address.follow_referral("https://b:1", "https://a:1")
    assert address.url == "https://c:1"


def test_heads_that_were_learned_outlive_the_supervisor(tmp_path):
    memory = str(tmp_path / "heads.json")
    HeadAddress("https://a:1", None, memory).add_heads(["https://a:1", "https://b:1"])
    again = HeadAddress("https://a:1", None, memory)
    again.switch_head("https://a:1")
    assert again.url == "https://b:1"


@pytest.mark.parametrize(
    "told",
    [
        "http://10.0.0.9:80",
        "http://there:1",
        "ftp://127.0.0.1:1",
        "//127.0.0.1:1",
        "http://127.0.0.1.there:1",
        "http://[",
        "",
    ],
)
def test_nobodys_word_leads_to_another_machine_in_the_clear(tmp_path, told):
    """Found by reading: whoever once passed for the head could send every supervisor, and its token, wherever they liked, for good."""
    memory = tmp_path / "heads.json"
    address = HeadAddress("http://127.0.0.1:1", None, str(memory))
    address.add_heads([told, "https://b:1"])
    address.follow_referral("http://127.0.0.1:1", told)
    assert address.url in ("http://127.0.0.1:1", "https://b:1")
    assert json.loads(memory.read_text())["heads"] == ["https://b:1"]


def test_file_of_the_head_of_this_machine_names_the_others(tmp_path):
    path = tmp_path / "head.json"
    path.write_text(json.dumps({"url": "http://here:1", "heads": ["https://here:2", "https://there:2"]}))
    address = HeadAddress("http://old:1", str(path))
    seen = [address.url]
    for _ in range(3):
        address.switch_head(address.url)
        seen.append(address.url)
    assert seen == ["http://here:1", "https://here:2", "https://there:2", "http://here:1"]


class Silent(BaseHTTPRequestHandler):
    """Takes a request and says nothing until it is let go."""

    let_go = threading.Event()

    def do_GET(self) -> None:
        self.let_go.wait(60)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_long_poll_at_a_head_that_no_longer_counts_is_cut():
    Silent.let_go.clear()
    server = HTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_address[1]}"
    address = HeadAddress(f"{here},http://127.0.0.1:9", None)
    poll = HeadConnection(HeadAccess(address=address, token="t"))
    began = monotonic()
    threading.Timer(0.3, address.follow_referral, (here, "http://127.0.0.1:9")).start()
    try:
        with pytest.raises(HeadUnavailable):
            poll.call("GET", "/v1/node/commands", timeout_s=60)
        assert monotonic() - began < 50  # a guard: without the cut it is the poll's own minute
    finally:
        Silent.let_go.set()
        server.shutdown()
        server.server_close()
