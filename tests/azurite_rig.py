"""Azure Blob Storage on loopback: Azurite, Microsoft's own emulator, with one container."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlencode

from benchmarks.cluster import free_port

_PROGRAM = Path(__file__).resolve().parents[1] / "build/azurite/node_modules/.bin/azurite-blob"
AZURITE = str(_PROGRAM) if _PROGRAM.exists() and shutil.which("node") else None
ACCOUNT = "devstoreaccount1"
# Public: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-08-06"


@contextlib.contextmanager
def azure_blobs(container: str) -> Iterator[int]:
    """Run it; yields the port."""
    assert AZURITE is not None, "make cloud-tools"
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder, "--silent"]
        words += ["--disableTelemetry", "--skipApiVersionCheck"]
        with subprocess.Popen([AZURITE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                until_s = time.monotonic() + 60
                while True:
                    try:
                        _create(port, container)
                        break
                    except OSError:
                        assert time.monotonic() < until_s
                        time.sleep(0.1)
                yield port
            finally:
                server.kill()


def account_signature() -> str:
    """A shared access signature for all containers, good for a day: https://learn.microsoft.com/rest/api/storageservices/create-account-sas."""
    fields = {"sv": _VERSION, "ss": "b", "srt": "sco", "sp": "rwdlac", "spr": "https,http"}
    fields["se"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86_400))
    words = [
        ACCOUNT,
        *(fields[one] for one in ("sp", "ss", "srt")),
        "",
        fields["se"],
        "",
        fields["spr"],
        fields["sv"],
        "",
        "",
    ]
    signed = hmac.new(base64.b64decode(KEY), "\n".join(words).encode(), hashlib.sha256).digest()
    return urlencode({**fields, "sig": base64.b64encode(signed).decode()})


def _create(port: int, container: str) -> None:
    """Create a container, signed as https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key says."""
    date = formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n"
    text = "PUT" + "\n" * 12 + headers + f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    signed = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    given = {"x-ms-date": date, "x-ms-version": _VERSION, "Content-Length": "0"}
    given["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
    link.request("PUT", f"/{ACCOUNT}/{container}?restype=container", b"", given)
    status = link.getresponse().status
    link.close()
    assert status == 201, status
