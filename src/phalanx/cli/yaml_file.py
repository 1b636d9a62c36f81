"""Reads the YAML files that users name on the command line."""

from __future__ import annotations

import shlex

from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile
from phalanx.user_files.yaml_document import FileKind, YamlValue, parse_yaml


def read_yaml_file(path: str, kind: FileKind, *, missing_hint: str = "") -> YamlValue:
    """Return the mapping of the file at `path`; `-` reads standard input.

    Raises:
        BadFile: the file cannot be read, or as for `parse_yaml`.
        TooLarge: the file is larger than its kind may be; checked before parsing.
    """
    raw = read_file_bytes(path, kind.bytes_max, kind.name, missing_hint=missing_hint)
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadFile(
            f"{path}:1: is UTF-16; a {kind.name} must be UTF-8", hint=f"iconv -f UTF-16 -t UTF-8 {shlex.quote(path)}"
        )
    try:
        return parse_yaml(raw.decode("utf-8-sig"), kind, path=path)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadFile(
            f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            hint="save it as UTF-8, for example with iconv -f LATIN1 -t UTF-8",
        ) from None
