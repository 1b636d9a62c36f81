"""Secrets in our own programs beside the ranks: in no file, and in no command line of a container runtime."""

import pytest

from phalanx.core.work.secret import SECRETS_VARIABLE
from phalanx.node.logic.images import ContainerSettings, InstalledRuntime, RuntimeKind, variables_file
from phalanx.node.logic.variables.secret_variables import only_secrets, without_secrets
from phalanx.node.mpi.launch_order import LAUNCH_VARIABLE, read_start_environment, write_start_environment

VARIABLES = {SECRETS_VARIABLE: "HF_TOKEN,GONE", "HF_TOKEN": "a value of no use", "LR": "1"}


def test_the_environment_is_divided_by_the_names_of_its_secrets():
    assert only_secrets(VARIABLES) == {"HF_TOKEN": "a value of no use"}
    assert without_secrets(VARIABLES) == {SECRETS_VARIABLE: "HF_TOKEN,GONE", "LR": "1"}
    assert without_secrets({"LR": "1"}) == {"LR": "1"}


def test_what_agents_of_an_mpi_launcher_read_has_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCH_VARIABLE, str(tmp_path / "launch.json"))
    write_start_environment(VARIABLES)
    assert read_start_environment() == without_secrets(VARIABLES)
    assert [b"of no use" in path.read_bytes() for path in tmp_path.iterdir()] == [False]


def test_a_secret_that_podman_would_read_itself_is_refused_rather_than_written_to_a_file():
    runtime = InstalledRuntime(kind=RuntimeKind.PODMAN, path="/usr/bin/podman")
    what = ContainerSettings(
        name="x",
        image="i",
        owner="o",
        workdir="/",
        uid=1,
        gid=1,
        mounts=(),
        folder="/scratch",
        nofile=(1, 1),
        processes=(1, 1),
    )
    variables = {SECRETS_VARIABLE: "REGISTRY_AUTH_FILE", "REGISTRY_AUTH_FILE": "a value of no use"}
    with pytest.raises(ValueError, match="secret REGISTRY_AUTH_FILE cannot be passed into an image"):
        variables_file(runtime, what, "rank-0", variables)
