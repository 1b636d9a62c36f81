"""A headless Chromium of Debian, driven over its DevTools protocol: for tests that need to see what a browser does."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 60.0  # a hang guard


def program() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Chromium:
    """One page of one browser, with a profile of its own. `problems`: what the page printed as an error, and scripts that failed.

    `received`: bytes of each answer by its request, as they came over the network. Of streams that last only the head: Chromium does not count
    their data before their end.
    """

    def __init__(self, folder: str, process: subprocess.Popen[bytes]) -> None:
        self.process, self.number = process, 0
        self.problems: list[str] = []
        self.dialogs: list[str] = []
        self.received: dict[str, int] = {}
        path = Path(folder, "DevToolsActivePort")
        end = time.monotonic() + WAIT_S
        while not (path.exists() and path.read_text().count("\n") >= 1):
            assert process.poll() is None, "chromium ended"
            assert time.monotonic() < end
            time.sleep(0.05)
        port, endpoint = path.read_text().split("\n")[:2]
        self.socket = connect(f"ws://127.0.0.1:{port}{endpoint}", max_size=None, proxy=None, legacy=True)
        self.session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """Send a command and return its result; events that come meanwhile are noted."""
        found = self._answer(method, params)
        assert "error" not in found, (method, found["error"])
        return found["result"]

    def _answer(self, method: str, params: dict[str, Any]) -> Any:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            found = json.loads(self.socket.recv(timeout=WAIT_S))
            if found.get("id") == message["id"]:
                return found
            self._note(found)

    def _note(self, event: Any) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.dataReceived":
            self._count(params["requestId"], params["encodedDataLength"])  # 0 for a page itself until it is complete
        elif method == "Network.responseReceived":
            self._count(params["requestId"], params["response"]["encodedDataLength"])  # its head
        elif method == "Network.loadingFinished":
            self.received[params["requestId"]] = int(params["encodedDataLength"])  # all of it, with its head
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            self.number += 1
            accept = {"id": self.number, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
            self.socket.send(json.dumps({**accept, "sessionId": self.session}))

    def _count(self, request: str, more: int) -> None:
        self.received[request] = self.received.get(request, 0) + more

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true in the page, also over a navigation, and return it."""
        end = time.monotonic() + WAIT_S
        while True:
            asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
            found = self._answer("Runtime.evaluate", asked)
            if "error" in found:  # the page went away while it evaluated
                assert "navigated" in found["error"]["message"], found
            result = found.get("result", {})
            value = None if "exceptionDetails" in result else result.get("result", {}).get("value")
            if value not in (None, False, 0, ""):  # an element comes as {}
                return value
            assert time.monotonic() < end, (script, self.run("document.body.innerText.slice(0, 2000)"), self.problems)
            time.sleep(0.05)

    def open(self, url):
        """Go to a page and wait until it is loaded."""
        mark = f"left-{self.number}"
        self.run(f"window.mark = '{mark}'")
        self.send("Page.navigate", url=url)
        self.until(f"window.mark !== '{mark}' && document.readyState === 'complete'")

    def press(self, key, code=None):
        """Press a key, as a person does."""
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        fields = {
            "key": key,
            "code": code or key,
            "windowsVirtualKeyCode": {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0),
        }
        arrows = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        fields["windowsVirtualKeyCode"] = arrows.get(key, fields["windowsVirtualKeyCode"])
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text):
        """Type text into what has the focus."""
        self.send("Input.insertText", text=text)

    def click(self, selector):
        """Click the middle of an element with the mouse."""
        place = self.until(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); if (!one) return null;"
            " one.scrollIntoView({block: 'center'}); const r = one.getBoundingClientRect();"
            " return r.width ? [r.x + r.width / 2, r.y + r.height / 2] : null })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def screenshot(self, path, *, width=1280, height=800, scheme="light"):
        """Write a picture of the page."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(0.3)  # a picture for people: nothing is asserted of it
        Path(path).write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def chromium() -> Iterator[Chromium]:
    """A running browser."""
    with tempfile.TemporaryDirectory(prefix="phalanx-chromium-", ignore_cleanup_errors=True) as folder:
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        process = subprocess.Popen(
            [program() or PROGRAMS[0], *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Chromium(folder, process)
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=60)
