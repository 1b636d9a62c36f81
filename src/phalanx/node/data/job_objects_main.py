"""Does one thing with a job's checkpoints or outputs in an object store: `python -I -m phalanx.node.data.job_objects_main`.

Started by `transfer.object_program` under the job's account, with the job's variables and secrets. The order is one line of JSON on the
input; the program ends when its input does. It writes {"bytes": n} for each piece stored, and last {"result": ...}, {"superseded": true}, or
{"why": text, "again": whether to try again}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, Final

from phalanx.node.data import checkpoint_objects, output_objects
from phalanx.node.data.sources import ObjectsRefused, SourceUnavailable
from phalanx.node.logic.dataset import DatasetInvalid
from phalanx.node.logic.output_mask import OutputMasker
from phalanx.node.logic.variables.secret_variables import only_secrets
from phalanx.wire.manifest import CheckpointInvalid

_lock: Final = threading.Lock()


def main() -> int:
    """Read the order, carry it out, write the answer."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        _write({"result": _do(order)})
    except output_objects.AttemptOver:
        _write({"superseded": True})
    except SourceUnavailable as error:
        _write({"why": _masked(error), "again": True})
    except (DatasetInvalid, CheckpointInvalid, OSError, ValueError, KeyError, TypeError) as error:
        _write({"why": _masked(error), "again": False})
    return 0


def _do(order: dict[str, Any]) -> str | int | list[list[str]] | None:
    from phalanx.node.data.object_store import ObjectFolder  # fails on a node without obstore, and says so

    found: str | int | list[list[str]] | None = None
    try:
        url = order.pop("url", "")
        match order.pop("do"):
            case "upload":
                found = checkpoint_objects.upload(ObjectFolder(url), **order, on_bytes=_count)
                if found:
                    parent, _, step = url.rpartition("/")
                    checkpoint_objects.remove_incomplete(ObjectFolder(parent), step)
            case "download":
                checkpoint_objects.download(ObjectFolder(url), **order)
            case "remove":
                for one in order["urls"]:
                    checkpoint_objects.remove(ObjectFolder(one))
            case "begin":
                found = checkpoint_objects.begin_attempt(ObjectFolder(url), **order)
            case "end":
                found = checkpoint_objects.remove_incomplete(ObjectFolder(url))
            case "begin_outputs":
                found = output_objects.begin(ObjectFolder(url), **order, on_bytes=_count)
            case "send_outputs":
                found = output_objects.send(ObjectFolder(url), **order, on_bytes=_count)
            case other:
                raise ValueError(f"unknown order {other!r}")
    except ObjectsRefused as error:
        raise CheckpointInvalid(str(error)) from error
    return found


def _count(number: int) -> None:
    _write({"bytes": number})


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)  # the supervisor is gone or has given up


def _write(answer: dict[str, object]) -> None:
    with _lock:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _masked(error: Exception) -> str:
    """The error; a store may repeat a part of its request."""
    return OutputMasker(only_secrets(os.environ).values()).mask(str(error).encode()).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
