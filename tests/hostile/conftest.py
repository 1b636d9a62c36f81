"""Where nonsense is run: what a command writes under the name it was given stays out of the checkout."""

import pytest


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
