"""Object stores: s3://, gs:// and az:// by obstore, the only place that imports it. Credentials come from the job's variables."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from phalanx.node.data.sources import ObjectExists, ObjectMissing, ObjectsRefused, SourceUnavailable
from phalanx.node.data.store_access import obstore_settings
from phalanx.node.logic.dataset import DataFile, Dataset, DatasetInvalid

try:
    import obstore
    from obstore import exceptions
    from obstore.store import from_url
except ImportError as error:
    raise DatasetInvalid(
        "obstore is not installed on this node, which reads s3://, gs:// and az://; install it beside Phalanx there"
    ) from error

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import RetryConfig

_PAGE: Final = 1000  # objects; the most that S3 lists in one answer
_PART_BYTES: Final = 16 << 20
_PARTS_MAX: Final = 9000  # S3 allows 10,000
_PART_THREADS: Final = 4
_GONE: Final = (exceptions.NotFoundError, FileNotFoundError)  # obstore raises the second for some stores
# The codes of S3, Google and Azure in the text of an error, as obstore has no type for it.
_NO_BUCKET: Final = re.compile("NoSuchBucket|ContainerNotFound")
_DENIED: Final = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
# The caller tries again later; meanwhile it can say what is wrong.
_RETRY: Final[RetryConfig] = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}


class ObjectStoreSource:
    """One object, or all objects below a prefix."""

    threads = 8  # an object store answers in some 30 ms and serves 50 to 100 MB/s to one request

    def __init__(self, source: str) -> None:
        """Parse the address; sends nothing.

        Raises:
            DatasetInvalid: it names no bucket, or a setting is not valid.
        """
        scheme, _, rest = source.partition("://")
        bucket, _, prefix = rest.partition("/")
        self._source, self._prefix = source, prefix.strip("/")
        self._base = self._prefix
        try:
            # `AWS_ENDPOINT_URL=http://...` says what the user wants; obstore asks for a second setting.
            config: Any = obstore_settings(scheme, os.environ) or None
            self._store = from_url(f"{scheme}://{bucket}", config=config, client_options={"allow_http": True})
        except (exceptions.BaseError, ValueError) as error:
            raise DatasetInvalid(f"{source}: {_line(error)}") from error

    def list(self) -> Dataset:
        """See `DataSource`."""
        try:
            found = [one for page in obstore.list(self._store, self._prefix, chunk_size=_PAGE) for one in page]
            single = not found and bool(self._prefix)
            if single:
                found = [obstore.head(self._store, self._prefix)]
                self._base = self._prefix.rpartition("/")[0]
            elif found:
                obstore.head(
                    self._store, found[0]["path"]
                )  # listing is a right of its own: this one is that of reading
        except _GONE as error:
            raise DatasetInvalid(f"{self._source}: {_missing(error) or 'no files there'}") from error
        except _DENIED as error:
            raise DatasetInvalid(f"{self._source}: the job may not read it: {_line(error)}") from error
        except exceptions.BaseError as error:
            if why := _missing(error):
                raise DatasetInvalid(f"{self._source}: {why}") from error
            raise SourceUnavailable(f"{self._source}: {_line(error)}") from error
        start = len(self._base) + 1 if self._base else 0
        files = [
            DataFile(one["path"][start:], one["size"], f"{one['e_tag'] or ''} {one['last_modified'].timestamp()}")
            for one in found
            if one["size"] or not one["path"].endswith("/")
        ]
        return Dataset(self._source, files, single=single)

    def read(self, file: DataFile, offset: int, size_bytes: int) -> bytes:
        """See `DataSource`."""
        path = f"{self._base}/{file.path}" if self._base else file.path
        tag = file.version.partition(" ")[0]
        try:
            options: GetOptions = {"range": (offset, offset + size_bytes)}
            if tag:
                options["if_match"] = tag
            return bytes(obstore.get(self._store, path, options=options).bytes())
        except (exceptions.PreconditionError, *_GONE) as error:
            raise DatasetInvalid(f"{self._source}: {file.path} changed since it was listed") from error
        except _DENIED as error:
            raise DatasetInvalid(f"{self._source}: the job may not read {file.path}: {_line(error)}") from error
        except exceptions.BaseError as error:
            raise SourceUnavailable(f"{self._source}: {file.path}: {_line(error)}") from error


class ObjectFolder:
    """The objects below an address, for reading and writing. Paths are relative to the address. Thread-safe.

    All methods raise `SourceUnavailable` if the store does not answer, and `ObjectsRefused` if it refuses.
    """

    def __init__(self, url: str) -> None:
        """Parse the address; sends nothing."""
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        self.url, self._prefix = url.rstrip("/"), prefix.strip("/")
        # The store compares what it gets with a checksum in the request. Others than S3 do so by TLS alone.
        checksum = {"checksum_algorithm": "SHA256"} if scheme == "s3" else {}
        config: Any = {**obstore_settings(scheme, os.environ), **checksum} or None
        try:
            self._store = from_url(
                f"{scheme}://{bucket}", config=config, client_options={"allow_http": True}, retry_config=_RETRY
            )
        except (exceptions.BaseError, ValueError) as error:
            raise ObjectsRefused(f"{url}: {_line(error)}") from error

    def put(self, path: str, data: bytes) -> str:
        """Create an object in one request; returns its ETag, "" from a store without.

        Raises:
            ObjectExists: there is one; the store decides, so that two writers cannot both succeed.
        """
        with self._errors(path):
            found = obstore.put(self._store, self._path(path), data, mode="create", use_multipart=False)
        return _tag(found["e_tag"])

    def replace(self, path: str, data: bytes | Iterable[bytes], size_bytes: int = 0) -> str:
        """Store an object, also over an earlier one; returns its ETag. Many bytes go in parts, of which a failed one is sent again.

        Args:
            path: its name.
            data: its bytes, whole or in pieces.
            size_bytes: of all pieces together.
        """
        part = max(_PART_BYTES, size_bytes // _PARTS_MAX + 1)
        with self._errors(path):
            if isinstance(data, bytes) or size_bytes <= _PART_BYTES:
                whole = data if isinstance(data, bytes) else b"".join(data)
                found = obstore.put(self._store, self._path(path), whole, mode="overwrite", use_multipart=False)
            else:
                found = obstore.put(
                    self._store,
                    self._path(path),
                    iter(data),
                    mode="overwrite",
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_PART_THREADS,
                )
        return _tag(found["e_tag"])

    def read_range(self, path: str, begin: int, end: int) -> bytes:
        """Read bytes `begin` to `end`, not inclusive.

        Raises:
            ObjectMissing: it does not exist.
        """
        with self._errors(path):
            return bytes(obstore.get_range(self._store, self._path(path), start=begin, end=end))

    def get(self, path: str) -> bytes:
        """Read an object.

        Raises:
            ObjectMissing: it does not exist.
        """
        with self._errors(path):
            return bytes(obstore.get(self._store, self._path(path)).bytes())

    def list(self, path: str = "") -> dict[str, tuple[int, str]]:
        """Size in bytes and ETag of each object below `path`."""
        start = len(self._prefix) + 1 if self._prefix else 0
        with self._errors(path):
            pages = obstore.list(self._store, self._path(path), chunk_size=_PAGE)
            return {one["path"][start:]: (one["size"], _tag(one["e_tag"])) for page in pages for one in page}

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects; missing ones are skipped."""
        found = [self._path(path) for path in paths]
        for begin in range(0, len(found), _PAGE):
            with self._errors(""), contextlib.suppress(*_GONE):
                obstore.delete(self._store, found[begin : begin + _PAGE])

    def _path(self, path: str) -> str:
        return f"{self._prefix}/{path}".strip("/")

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        where = f"{self.url}/{path}".rstrip("/")
        try:
            yield
        except exceptions.AlreadyExistsError as error:
            raise ObjectExists(f"{where} exists already") from error
        except _GONE as error:
            if why := _missing(error):
                raise ObjectsRefused(f"{self.url}: {why}") from error
            raise ObjectMissing(f"{where} does not exist") from error
        except _DENIED as error:
            raise ObjectsRefused(f"{where}: the job may not use it: {_line(error)}") from error
        except exceptions.BaseError as error:
            if why := _missing(error):
                raise ObjectsRefused(f"{self.url}: {why}") from error
            raise SourceUnavailable(f"{where}: {_line(error)}") from error


def _tag(e_tag: str | None) -> str:
    """An ETag as all stores write it: Azure has quotes in some answers only."""
    return (e_tag or "").strip('"')


def _missing(error: Exception) -> str:
    """What is missing, if it is more than an object; "" else."""
    return "no such bucket" if _NO_BUCKET.search(str(error)) else ""


def _line(error: Exception) -> str:
    """The first line of an error of obstore; the rest is a dump of its structures."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
