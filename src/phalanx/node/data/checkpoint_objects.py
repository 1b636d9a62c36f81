"""Checkpoints in an object store: each node stores its own files there, and node rank 0 completes the checkpoint.

    <address>/<folder of the job>/<folder of the attempt>/step-<8 digits>/
        objects/<SHA-256>               a chunk of a file; its name is its content, so a repeated upload sends what is missing
        node-<rank>-<digest>.json       which chunks the files of a node have
        manifest.json                   written last, if nothing has that name: which chunks each file of the checkpoint has

A chunk is one request. Uploads in several parts would leave parts that no list shows if their program is killed.
The SHA-256 of manifest.json identifies the checkpoint, so it proves every chunk. Folders have random keys in their names
and belong to one attempt: an old attempt can overwrite nothing of a later one, and what it writes late is never published.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from phalanx.node.data.sources import ObjectExists, ObjectMissing
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import MANIFEST_NAME, CheckpointInvalid, CheckpointManifest

if TYPE_CHECKING:
    from phalanx.node.data.object_store import ObjectFolder

CHUNK_BYTES: Final = 64 << 20
OTHER_NODES_S: Final = 60.0  # node rank 0 gives up if the others store nothing for so long
_THREADS: Final = 4  # and one chunk more is in memory than are sent
_FORMAT: Final = "phalanx-objects-1"
_POLL_S: Final = 0.5
_TRIES: Final = 3  # of a chunk whose bytes do not match
_OBJECTS: Final = "objects"
_PARTIAL: Final = ".partial"
_OWN: Final = re.compile(rf"{re.escape(MANIFEST_NAME)}|{_OBJECTS}/[0-9a-f]{{64}}|node-\d+-[0-9a-f]+\.json")


def upload(
    store: ObjectFolder,
    folder: str,
    digest: str,
    *,
    rank: int,
    nodes: int,
    on_bytes: Callable[[int], None],
    others_s: float = OTHER_NODES_S,
) -> str:
    """Store this node's files of a checkpoint. On node rank 0: wait for the other nodes, verify all, and complete it.

    Args:
        store: the step's folder.
        folder: of the checkpoint on this node, with the manifest of all nodes.
        digest: of that manifest.
        rank: of this node in the gang.
        nodes: of the gang.
        on_bytes: receives the number of bytes of each chunk that is stored, here or by another node.
        others_s: how long node rank 0 waits for others that store nothing.

    Returns:
        The SHA-256 of the stored manifest; "" on other nodes.

    Raises:
        CheckpointInvalid: the files are not those of the manifest, or another node did not store its files.
        SourceUnavailable, ObjectsRefused: as in `ObjectFolder`.
        OSError: a file cannot be read.
    """
    with manifests.open_regular(os.path.join(folder, MANIFEST_NAME)) as file:
        encoded = file.read(manifests.MANIFEST_BYTES_MAX)
    if manifests.digest(encoded) != digest:
        raise CheckpointInvalid(f"{folder}: its manifest changed after the save")
    manifest = manifests.decode(encoded, where=folder)
    known = store.list(_OBJECTS)
    with ThreadPoolExecutor(_THREADS, "checkpoint-chunk") as threads:
        stored = {
            one.path: _store_file(
                store, threads, known, os.path.join(folder, one.path), (one.size_bytes, one.crc32), on_bytes
            )
            for one in manifest.files
            if os.path.exists(os.path.join(folder, one.path))
        }
    _create(store, f"node-{rank}-{digest}.json", json.dumps(stored, sort_keys=True).encode())
    return _complete(store, manifest, encoded, digest, nodes, on_bytes, others_s) if rank == 0 else ""


def download(store: ObjectFolder, digest: str, folder: str) -> None:
    """Make a checkpoint complete in a folder. Files and chunks that are there and match stay.

    Raises:
        CheckpointInvalid: it is not complete in the store, or not the one with this digest.
        SourceUnavailable, ObjectsRefused: as in `ObjectFolder`.
        OSError: the disk failed.
    """
    try:
        text = store.get(MANIFEST_NAME)
    except ObjectMissing as error:
        raise CheckpointInvalid(f"the store has no manifest of it: {error}") from error
    if hashlib.sha256(text).hexdigest() != digest:
        raise CheckpointInvalid("the manifest in the store differs from the published one")
    index = json.loads(text)
    encoded = index["manifest"].encode()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with ThreadPoolExecutor(_THREADS, "checkpoint-chunk") as threads:
        for file in manifests.decode(encoded, where=store.url).files:
            path = os.path.join(folder, file.path)
            if not os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep):
                raise CheckpointInvalid(f"its manifest names {file.path!r} outside the folder")
            if os.path.isfile(path) and manifests.checksum(path) == (file.size_bytes, file.crc32):
                continue
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            _fetch_file(store, threads, index["files"][file.path], path)
    with open(os.path.join(folder, f"{MANIFEST_NAME}{_PARTIAL}"), "wb") as out:
        out.write(encoded)
    os.replace(out.name, os.path.join(folder, MANIFEST_NAME))


def remove(store: ObjectFolder) -> None:
    """Delete a checkpoint, its manifest first: a part of it never looks complete."""
    store.delete([MANIFEST_NAME])
    store.delete(store.list())


def written(store: ObjectFolder) -> dict[str, int]:
    """Names and bytes of the objects of a checkpoint, its manifest first; other objects are left out."""
    found = {path: size for path, (size, _) in store.list().items() if _OWN.fullmatch(path)}
    return dict(sorted(found.items(), key=lambda one: one[0] != MANIFEST_NAME))


def is_whole(store: ObjectFolder) -> bool:
    """Whether the manifest of a checkpoint is there, and all chunks that it names, by name and size; no chunk is read."""
    try:
        files = json.loads(store.get(MANIFEST_NAME))["files"]
        found = store.list(_OBJECTS)
        chunks = [chunk for chunks in files.values() for chunk in chunks]
        return all(found.get(f"{_OBJECTS}/{sha256}", (-1, ""))[0] == size for sha256, size in chunks)
    except (ObjectMissing, ValueError, KeyError, TypeError, AttributeError):
        return False


def begin_attempt(store: ObjectFolder, attempt: str, keep: Collection[str], *, sweep: bool) -> int:
    """Prove that the job may write here; with `sweep`, delete what earlier attempts left and did not publish.

    Args:
        store: the job's folder.
        attempt: name of the folder of the attempt that begins.
        keep: addresses of the published checkpoints.
        sweep: whether to delete.

    Returns:
        The number of deleted objects.
    """
    probe = f"{attempt}/probe-{os.urandom(8).hex()}"
    store.put(probe, b"phalanx")
    store.delete([probe])
    if not sweep:
        return 0
    kept = tuple(f"{one.removeprefix(store.url).strip('/')}/" for one in keep)
    old = [path for path in store.list() if not path.startswith((f"{attempt}/", *kept))]
    store.delete(old)
    return len(old)


def remove_incomplete(store: ObjectFolder, before_step: str = "") -> int:
    """Delete steps without a manifest in the folder of an attempt, those before the folder `before_step` if it is given; returns the number of objects."""
    found = store.list()
    complete = {path.partition("/")[0] for path in found if path.endswith(f"/{MANIFEST_NAME}")}
    steps = {path: path.partition("/")[0] for path in found}
    old = [path for path, step in steps.items() if step not in complete and (not before_step or step < before_step)]
    store.delete(old)
    return len(old)


def _store_file(
    store: ObjectFolder,
    threads: ThreadPoolExecutor,
    known: dict[str, tuple[int, str]],
    path: str,
    expected: tuple[int, int],
    on_bytes: Callable[[int], None],
) -> list[list[Any]]:
    """Store a file's chunks; returns [SHA-256, bytes, ETag] of each."""
    sent: list[Future[list[Any]]] = []
    size, crc = 0, 0
    with manifests.open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
            if len(sent) >= _THREADS:
                sent[-_THREADS].result()  # bounds the memory
            sent.append(threads.submit(_store_chunk, store, known, chunk, on_bytes))
    if (size, crc) != expected:
        raise CheckpointInvalid(f"{path} changed after the save")
    return [one.result() for one in sent]


def _store_chunk(
    store: ObjectFolder, known: dict[str, tuple[int, str]], chunk: bytes, on_bytes: Callable[[int], None]
) -> list[Any]:
    sha256 = hashlib.sha256(chunk).hexdigest()
    name = f"{_OBJECTS}/{sha256}"
    size, tag = known.get(name, (0, ""))
    if size != len(chunk):
        try:
            tag = store.put(name, chunk)
        except ObjectExists:  # an answer was lost, or another node has the same bytes
            size, tag = store.list(name).get(name, (0, ""))
            if size != len(chunk):
                raise
    on_bytes(len(chunk))
    return [sha256, len(chunk), tag]


def _create(store: ObjectFolder, path: str, data: bytes) -> None:
    """Create an object; the same one may exist already, from a try whose answer was lost."""
    try:
        store.put(path, data)
    except ObjectExists:
        if store.get(path) != data:
            raise


def _complete(
    store: ObjectFolder,
    manifest: CheckpointManifest,
    encoded: bytes,
    digest: str,
    nodes: int,
    on_bytes: Callable[[int], None],
    others_s: float,
) -> str:
    files: dict[str, list[list[Any]]] = {}
    for path in _parts(store, nodes, digest, on_bytes, others_s):
        for name, chunks in json.loads(store.get(path)).items():
            files.setdefault(name, chunks)
    found = store.list(_OBJECTS)
    for file in manifest.files:
        chunks = files.get(file.path)
        if chunks is None or sum(size for _, size, _ in chunks) != file.size_bytes:
            raise CheckpointInvalid(f"no node stored {file.path}")
        for sha256, size, tag in chunks:
            if found.get(f"{_OBJECTS}/{sha256}") != (size, tag):
                raise CheckpointInvalid(f"{file.path}: the store has another chunk {sha256[:12]} than it received")
    index = {
        "format": _FORMAT,
        "manifest": encoded.decode(),
        "files": {one.path: [chunk[:2] for chunk in files[one.path]] for one in manifest.files},
    }
    text = json.dumps(index, sort_keys=True).encode()
    _create(store, MANIFEST_NAME, text)
    return hashlib.sha256(text).hexdigest()


def _parts(store: ObjectFolder, nodes: int, digest: str, on_bytes: Callable[[int], None], others_s: float) -> list[str]:
    """Wait until every node has stored its files; returns the lists of their chunks."""
    wanted = [f"node-{rank}-{digest}.json" for rank in range(nodes)]
    seen, moved_s = -1, time.monotonic()
    while True:
        found = store.list()
        missing = [one for one in wanted if one not in found]
        if not missing:
            return wanted
        size = sum(size for size, _ in found.values())
        if size != seen:
            on_bytes(size - max(seen, 0))
            seen, moved_s = size, time.monotonic()
        elif time.monotonic() - moved_s > others_s:
            raise CheckpointInvalid(f"node rank {missing[0].split('-')[1]} has not stored its files")
        time.sleep(_POLL_S)


def _fetch_file(store: ObjectFolder, threads: ThreadPoolExecutor, chunks: list[list[Any]], path: str) -> None:
    partial = f"{path}{_PARTIAL}"
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    manifests.require_regular(descriptor, partial)
    try:
        fetched = [
            threads.submit(_fetch_chunk, store, descriptor, offset, sha256, size)
            for offset, sha256, size in _offsets(chunks)
        ]
        for one in fetched:
            one.result()
        os.ftruncate(descriptor, sum(size for _, size in chunks))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(partial, path)


def _offsets(chunks: list[list[Any]]) -> Iterator[tuple[int, str, int]]:
    offset = 0
    for sha256, size in chunks:
        yield offset, sha256, size
        offset += size


def _fetch_chunk(store: ObjectFolder, descriptor: int, offset: int, sha256: str, size: int) -> None:
    if hashlib.sha256(os.pread(descriptor, size, offset)).hexdigest() == sha256:
        return  # from before an interruption
    for _ in range(_TRIES):
        try:
            data = store.get(f"{_OBJECTS}/{sha256}")
        except ObjectMissing as error:
            raise CheckpointInvalid(f"a chunk is missing: {error}") from error
        if hashlib.sha256(data).hexdigest() == sha256:
            view, done = memoryview(data), 0
            while done < len(data):
                done += os.pwrite(descriptor, view[done:], offset + done)
            return
    raise CheckpointInvalid(f"the bytes of the chunk {sha256[:12]} in {store.url} have another SHA-256")
