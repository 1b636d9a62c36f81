"""Folders, files of HTTP servers and the Hugging Face hub as sources of datasets."""

from __future__ import annotations

import http.client
import json
import os
import stat
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Final

from phalanx.node.data.sources import SourceUnavailable
from phalanx.node.logic.dataset import DataFile, Dataset, DatasetInvalid
from phalanx.wire.manifest import require_regular

_TIMEOUT_S: Final = 60.0  # a pause in an answer, not all of it
_HUB: Final = "https://huggingface.co"
_LISTING_BYTES_MAX: Final = 64 << 20  # one page of a hub's list has 1,000 entries, 0.3 MB


class FolderSource:
    """A file, or all regular files below a folder; links to files count as files, links to folders are not followed."""

    threads = 4

    def __init__(self, source: str, path: str) -> None:
        self._source, self._path = source, path.rstrip("/") or "/"
        self._root = self._path

    def list(self) -> Dataset:
        """See `DataSource`."""
        try:
            if not os.path.isdir(self._path):
                self._root = os.path.dirname(self._path)
                return Dataset(self._source, [self._file(os.path.basename(self._path))], single=True)
            return Dataset(self._source, [self._file(path) for path in self._walk()])
        except OSError as error:
            raise DatasetInvalid(f"{self._source}: {error.strerror} ({error.filename})") from error

    def read(self, file: DataFile, offset: int, size_bytes: int) -> bytes:
        """See `DataSource`."""
        path = os.path.join(self._root, file.path)
        try:
            descriptor = require_regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path)
            with open(descriptor, "rb", buffering=0) as opened:
                if _version(os.fstat(descriptor)) != file.version:
                    raise DatasetInvalid(f"{path} changed since it was listed")
                data = bytearray()
                while len(data) < size_bytes and (
                    part := os.pread(opened.fileno(), size_bytes - len(data), offset + len(data))
                ):
                    data += part
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise DatasetInvalid(f"{path}: {error.strerror}") from error
        except OSError as error:
            raise SourceUnavailable(f"{path}: {error}") from error
        return bytes(data)

    def _walk(self) -> Iterator[str]:
        def refuse(error: OSError) -> None:
            raise error

        for folder, _, names in os.walk(self._path, onerror=refuse):
            inner = os.path.relpath(folder, self._path)
            for name in names:
                path = name if inner == "." else os.path.join(inner, name)
                if os.path.isfile(os.path.join(self._path, path)):
                    yield path

    def _file(self, path: str) -> DataFile:
        path.encode()  # the name is sent to other nodes
        found = os.stat(os.path.join(self._root, path))
        if not stat.S_ISREG(found.st_mode):
            raise DatasetInvalid(f"{self._source}: neither a file nor a folder")
        return DataFile(path, found.st_size, _version(found))


class HttpFileSource:
    """One file at an address. Its server must answer requests for ranges."""

    threads = 4

    def __init__(self, source: str) -> None:
        self._source = source

    def list(self) -> Dataset:
        """See `DataSource`."""
        with _ask(self._source, {"Range": "bytes=0-0"}) as answer:
            size = _total_bytes(answer.headers.get("Content-Range", ""))
            if answer.status != 206 or size is None:
                raise DatasetInvalid(f"{self._source}: its server does not serve parts of files (Range)")
            version = _http_version(answer)
        name = (
            urllib.parse.unquote(urllib.parse.urlsplit(self._source).path.rpartition("/")[2]).replace("/", "_")
            or "data"
        )
        return Dataset(self._source, [DataFile(name, size, version)], single=True)

    def read(self, file: DataFile, offset: int, size_bytes: int) -> bytes:
        """See `DataSource`."""
        return _read_range(self._source, {}, file, offset, size_bytes)


class HubSource:
    """A dataset or model of the Hugging Face hub: hf://[datasets/]ORG/NAME[@REVISION][/PATH]. HF_ENDPOINT and HF_TOKEN as in its own client."""

    threads = 8

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        words = source.removeprefix("hf://").strip("/").split("/")
        self._kind = words.pop(0) if words[0] in {"datasets", "models", "spaces"} else "models"
        if len(words) < 2:
            raise DatasetInvalid(f"{source}: write hf://datasets/ORGANISATION/NAME or hf://ORGANISATION/NAME")
        name, _, self._revision = words[1].partition("@")
        self._source, self._name = source, f"{words[0]}/{name}"
        self._folder = "/".join(words[2:])
        self._hub = (variables.get("HF_ENDPOINT") or _HUB).rstrip("/")
        token = variables.get("HF_TOKEN") or ""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._commit = ""

    def list(self) -> Dataset:
        """See `DataSource`."""
        about = f"{self._hub}/api/{self._kind}/{self._name}"
        revision = urllib.parse.quote(self._revision or "main", safe="")
        found, _ = self._json(f"{about}/revision/{revision}")
        self._commit = str(found.get("sha", "")) if isinstance(found, dict) else ""
        if not self._commit.isalnum():
            raise DatasetInvalid(f"{self._source}: the hub names no revision")
        files = []
        page = f"{about}/tree/{self._commit}?recursive=true"
        while page:
            entries, page = self._json(page)
            files += [
                DataFile(str(one["path"]), int(one["size"]), str((one.get("lfs") or one).get("oid", "")))
                for one in (entries if isinstance(entries, list) else ())
                if one.get("type") == "file"
                and f"{one['path']}/".startswith(f"{self._folder}/" if self._folder else "")
            ]
        return Dataset(self._source, files)

    def read(self, file: DataFile, offset: int, size_bytes: int) -> bytes:
        """See `DataSource`."""
        kind = "" if self._kind == "models" else f"{self._kind}/"
        url = f"{self._hub}/{kind}{self._name}/resolve/{self._commit}/{urllib.parse.quote(file.path)}"
        unversioned = DataFile(file.path, file.size_bytes, "")  # the commit is part of the address
        return _read_range(url, self._headers, unversioned, offset, size_bytes)

    def _json(self, url: str) -> tuple[object, str]:
        """The answer, and the address of its next page. It must be at the hub: the token goes there."""
        with _ask(url, self._headers) as answer:
            following = answer.headers.get("Link", "").partition("<")[2].partition(">")[0]
            found = json.loads(answer.read(_LISTING_BYTES_MAX))
        return found, following if following.startswith(f"{self._hub}/") else ""


def _version(found: os.stat_result) -> str:
    return f"{found.st_size}-{found.st_mtime_ns}"


def _http_version(answer: http.client.HTTPResponse) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _total_bytes(content_range: str) -> int | None:
    total = content_range.rpartition("/")[2]
    return int(total) if total.isdecimal() else None


def _read_range(url: str, headers: Mapping[str, str], file: DataFile, offset: int, size_bytes: int) -> bytes:
    condition = {"If-Range": file.version} if file.version and not file.version.startswith("W/") else {}
    asked = {**headers, **condition, "Range": f"bytes={offset}-{offset + size_bytes - 1}"}
    with _ask(url, asked) as answer:
        total = _total_bytes(answer.headers.get("Content-Range", ""))
        # A server that does not compare weak versions itself still names the one that it sends.
        if answer.status != 206 or total != file.size_bytes or (file.version and _http_version(answer) != file.version):
            raise DatasetInvalid(f"{url} changed since it was listed")
        try:
            return answer.read(size_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise SourceUnavailable(f"{url}: {error!r}") from error


def _ask(url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    # Credentials as an unredirected header: they do not follow to the store to which a hub redirects.
    request = urllib.request.Request(url)  # noqa: S310  `parse_data` and the hub's prefix leave only http and https
    for name, value in headers.items():
        request.add_unredirected_header(name, value) if name == "Authorization" else request.add_header(name, value)
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # type: ignore[no-any-return]  # noqa: S310  as above
    except urllib.error.HTTPError as error:
        if error.code in {408, 425, 429} or error.code >= 500:
            raise SourceUnavailable(f"{url}: status {error.code}") from error
        raise DatasetInvalid(f"{url}: status {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise SourceUnavailable(f"{url}: {error}") from error
