"""The copy of a working directory: what belongs to it, that equal folders are equal bytes, and what is refused."""

import os
import tarfile

import pytest

from phalanx.client.workdir_archive import archive_workdir
from phalanx.core.errors import BadFile, TooLarge


def lay(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(packed):
    with tarfile.open(fileobj=packed.file, mode="r:") as archive:
        return [member.name for member in archive]


def test_gitignore_is_obeyed_at_every_level(tmp_path):
    folder = lay(
        tmp_path,
        {
            ".gitignore": "*.log\ndata/\n!keep.log\n/top.txt\n",
            "train.py": "x",
            "a.log": "x",
            "keep.log": "x",
            "data/big.bin": "x",
            "top.txt": "x",
            "src/top.txt": "x",
            "src/.gitignore": "!a.log\nsecret*\n",
            "src/a.log": "x",
            "src/secret.txt": "x",
            ".git/config": "x",
        },
    )
    packed = archive_workdir(str(folder))
    assert names(packed) == [".gitignore", "keep.log", "src", "src/.gitignore", "src/a.log", "src/top.txt", "train.py"]
    assert packed.files == 6
    assert packed.skipped == ()


def test_rules_above_a_subfolder_of_a_repository_hold_too(tmp_path):
    lay(
        tmp_path,
        {
            ".git/info/exclude": "*.tmp\n",
            ".gitignore": "*.pt\n/job/private/\n",
            "job/a.py": "",
            "job/m.pt": "",
            "job/b.tmp": "",
            "job/private/x": "",
        },
    )
    assert names(archive_workdir(str(tmp_path / "job"))) == ["a.py"]


def test_without_a_repository_rules_above_do_not_count(tmp_path):
    lay(tmp_path, {".gitignore": "*.pt\n", "job/m.pt": ""})
    assert names(archive_workdir(str(tmp_path / "job"))) == ["m.pt"]


def test_equal_folders_have_equal_bytes(tmp_path):
    files = {"b.py": "1", "a/c.py": "2", "z.sh": "3"}
    one, two = lay(tmp_path / "one", files), lay(tmp_path / "two", dict(reversed(files.items())))
    os.utime(two / "b.py", (1, 1))
    os.chmod(two / "b.py", 0o600)
    assert archive_workdir(str(one)).sha256 == archive_workdir(str(two)).sha256
    os.chmod(two / "z.sh", 0o755)
    assert archive_workdir(str(one)).sha256 != archive_workdir(str(two)).sha256


def test_links_stay_links_and_those_that_lead_outside_stay_here(tmp_path):
    folder = lay(tmp_path / "job", {"a.py": "x", "sub/b.py": "x"})
    os.symlink("a.py", folder / "inside")
    os.symlink("../a.py", folder / "sub" / "up")
    os.symlink("/etc/passwd", folder / "absolute")
    os.symlink("../../elsewhere", folder / "sub" / "out")
    os.mkfifo(folder / "pipe")
    packed = archive_workdir(str(folder))
    assert names(packed) == ["a.py", "inside", "sub", "sub/b.py", "sub/up"]
    assert sorted(packed.skipped) == [
        "absolute (a link to /etc/passwd, outside the folder)",
        "pipe (neither file, folder nor link)",
        "sub/out (a link to ../../elsewhere, outside the folder)",
    ]


def test_the_tokens_of_a_home_directory_stay_here(tmp_path, monkeypatch):
    """Found by running a job in the home directory: token, node secret and database of the head went to every node."""
    home = lay(
        tmp_path / "home", {"a.py": "x", ".phalanx/node_secret": "s", "run/state/token": "t", ".config/other": "x"}
    )
    lay(home, {".config/phalanx/clusters.json": "t"})
    os.symlink("run/state", home / "state")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PHALANX_HOME", str(home / "run" / "state"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    packed = archive_workdir(str(home))
    assert names(packed) == [".config", ".config/other", "a.py", "run", "state"]
    assert sorted(packed.skipped) == [
        f"{name} (Phalanx's own folder, with tokens)" for name in (".config/phalanx", ".phalanx", "run/state")
    ]


def test_a_folder_that_is_a_loop_of_links_ends(tmp_path):
    folder = lay(tmp_path / "job", {"a.py": "x"})
    os.symlink(".", folder / "again")
    assert names(archive_workdir(str(folder))) == ["a.py", "again"]


def test_too_large_names_the_largest(tmp_path):
    folder = lay(tmp_path, {"a.py": "x"})
    for index, size in enumerate((60, 50, 40), start=1):
        with open(folder / f"w{index}.pt", "wb") as file:
            file.truncate(size << 20)
    with pytest.raises(TooLarge, match=r"w1\.pt \(60 MiB\), w2\.pt \(50 MiB\), w3\.pt") as caught:
        archive_workdir(str(folder))
    assert ".gitignore" in caught.value.hint
    assert caught.value.exit_code == 78


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(BadFile, match="nowhere"):
        archive_workdir(str(tmp_path / "nowhere"))


def test_odd_names_travel(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    for name in (b"with space", b"ume\xcc\x88", b"not-utf8-\xff", b"n" * 200):
        with open(os.path.join(os.fsencode(folder), name), "wb"):
            pass
    assert len(names(archive_workdir(str(folder)))) == 4
