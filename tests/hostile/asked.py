"""One request as bytes, who sends it, and the line that sends it again."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import quote

HEAD_BYTES_SHOWN = 20_000  # of a request in a line to type; above it is written to a file
NOBODY = "nobody"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request.

    Attributes:
        source: which of the three generators made it, for the count.
        operation: of the description ("" outside of it), and what is odd about this one.
        target: path and query, as sent.
        role: whose token goes along; NOBODY for none.
        waits: it may hang or stream by right (a long poll, a followed log): the caller listens shortly and leaves.
        wire: the whole request as bytes, where its form itself is odd; `method`, `target` and `body` are not read then.
        ends: the caller closes its side after the last byte, so that nobody waits for more.
    """

    source: str
    operation: str = ""
    method: str = "GET"
    target: str = "/"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    role: str = NOBODY
    waits: bool = False
    wire: bytes | None = None
    ends: bool = False
    odd: str = field(default="", compare=False)

    def as_bytes(self, host: str, token: str) -> bytes:
        """What goes over the line. In `wire`, the words {host} and {token} stand for the head's and the role's."""
        if self.wire is not None:
            return self.wire.replace(b"{host}", host.encode()).replace(b"{token}", token.encode())
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {host}"]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.body or self.method in ("POST", "PUT", "PATCH"):
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + self.body

    def again(self, host: str) -> str:
        """A line for a shell that sends the same; $TOKEN stands for the token of the role."""
        token = "" if self.role == NOBODY else "$TOKEN"
        request = self.as_bytes(host, token)
        if self.wire is not None or len(self.body) > HEAD_BYTES_SHOWN:
            name, port = host.rsplit(":", 1)
            cut = request if len(request) <= HEAD_BYTES_SHOWN else request[:HEAD_BYTES_SHOWN]
            note = "" if cut is request else f"   # cut: {len(request)} bytes in all"
            return f"echo {base64.b64encode(cut).decode()} | base64 -d | sed s/.TOKEN/$TOKEN/ | nc {name} {port}{note}"
        words = [
            "curl",
            "-sS",
            "-i",
            "-X",
            self.method,
            f"'http://{host}{quote(self.target, safe='%/?&=+,:;@~!*()[]$-_.')}'",
        ]
        if token:
            words += ["-H", '"Authorization: Bearer $TOKEN"']
        for name, value in self.headers:
            words += ["-H", _quoted(f"{name}: {value}")]
        if self.body:
            words += ["--data-binary", f"@<(echo {base64.b64encode(self.body).decode()} | base64 -d)"]
        return " ".join(words)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
