"""Checks the requests of a batch, line by line, before anything runs. Memory does not grow with the file, but for 8 bytes a request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Final

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
)
FILE_BYTES_MAX: Final = 200_000_000  # OpenAI's limit for a file of a batch
LINES_MAX: Final = 100_000
LINE_BYTES_MAX: Final = 16 << 20  # as for one request to the gateway
CUSTOM_ID_MAX: Final = 512
ERRORS_MAX: Final = 50  # that are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class InputError:
    """What is wrong with a file. `line`: from 1; None for the whole file. `param`: the field."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(slots=True, kw_only=True)
class InputCheck:
    """The result of a check, filled while the lines are read.

    Attributes:
        endpoint: that all requests name.
        model: that all requests name; "" until the first is read.
        lines: requests so far. errors: at most ERRORS_MAX, of `wrong` lines.
    """

    endpoint: str
    model: str = ""
    lines: int = 0
    wrong: int = 0
    errors: list[InputError] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)

    def read(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the lines as they are, each checked; after it, `errors` says what is wrong."""
        number = 0
        while text := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            if len(text) > LINE_BYTES_MAX:
                self._add(number, "line_too_long", f"a line has at most {LINE_BYTES_MAX >> 20} MiB")
                return
            if text.strip():
                self.lines += 1
                if self.lines > LINES_MAX:
                    self._add(None, "too_many_requests", f"a batch has at most {LINES_MAX:,} requests")
                    return
                self._check(number, text)
            yield text if text.endswith(b"\n") else text + b"\n"
        if not self.lines:
            self._add(None, "empty_file", "the file has no request")

    def _add(self, number: int | None, code: str, message: str, param: str | None = None) -> None:
        self.wrong += 1
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(InputError(code=code, message=message, line=number, param=param))

    def _check(self, number: int, text: bytes) -> None:
        try:
            record = json.loads(text, parse_constant=_refuse_constant)
        except UnicodeDecodeError:
            self._add(number, "invalid_encoding", "the line is not UTF-8")
            return
        except (ValueError, RecursionError):
            self._add(number, "invalid_json_line", "the line is not JSON")
            return
        if not isinstance(record, dict):
            self._add(number, "invalid_json_line", "the line is no JSON object")
            return
        self._check_id(number, record.get("custom_id"))
        if record.get("method") != "POST":
            self._add(number, "invalid_method", "method must be POST", "method")
        if record.get("url") != self.endpoint:
            shown = f"{str(record.get('url'))[:80]!r}"
            self._add(number, "mismatched_endpoint", f"url is {shown}; this batch is for {self.endpoint}", "url")
        body = record.get("body")
        if not isinstance(body, dict):
            self._add(number, "missing_required_parameter", "body must be a JSON object", "body")
            return
        if body.get("stream"):
            self._add(number, "invalid_value", "a batch has no streams: leave out stream", "body.stream")
        model = body.get("model")
        if not isinstance(model, str) or not model:
            self._add(number, "missing_required_parameter", "body.model must name the service", "body.model")
        elif not self.model:
            self.model = model
        elif model != self.model:
            text_ = f"body.model is {model[:80]!r}; all requests of a batch have one model, {self.model[:80]!r}"
            self._add(number, "mismatched_model", text_, "body.model")

    def _check_id(self, number: int, custom_id: object) -> None:
        if not isinstance(custom_id, str) or not custom_id or len(custom_id) > CUSTOM_ID_MAX:
            wanted = f"custom_id must be a text of 1 to {CUSTOM_ID_MAX} characters"
            self._add(number, "missing_required_parameter", wanted, "custom_id")
            return
        mark = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if mark in self._seen:
            self._add(number, "duplicate_custom_id", f"custom_id {custom_id[:80]!r} is used twice", "custom_id")
        self._seen.add(mark)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are no JSON, and engines refuse them
