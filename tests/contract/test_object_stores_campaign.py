"""What Phalanx needs of an object store holds for s3://, gs:// and az:// alike, each spoken by obstore to a server of its own."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from phalanx.node.data.rclone_remote import find_rclone, remote_variables
from phalanx.node.data.source_opener import open_source
from phalanx.node.data.sources import ObjectExists, ObjectMissing, ObjectsRefused, SourceUnavailable
from phalanx.node.logic.dataset import DataFile, DatasetInvalid
from tests.azurite_rig import account_signature
from tests.gcs_rig import TOKEN_PATH
from tests.object_rig import BUCKET, SCHEMES, faulty_store, missing_tool, variables_of

pytestmark = [pytest.mark.prove, pytest.mark.serial, pytest.mark.timeout(200)]
ODD = "odd [1] ä+%20,x.txt"
PARTS = 40 << 20  # more than one part


@pytest.fixture(scope="module", params=SCHEMES)
def store(request):
    if why := missing_tool(request.param):
        pytest.skip(why)
    with faulty_store(request.param) as made, pytest.MonkeyPatch.context() as patch:
        for name, text in made.variables.items():
            patch.setenv(name, text)
        yield made


@pytest.fixture
def folder(store, request):
    """A folder of this test's own, and its address."""
    from phalanx.node.data.object_store import ObjectFolder

    store.forget()
    yield ObjectFolder(f"{store.place}/{request.function.__name__}")
    store.forget()


def test_an_object_is_created_once_and_replaced_as_often_as_wanted(folder):
    first = folder.put("in/a.txt", b"hello")
    assert first
    with pytest.raises(ObjectExists):
        folder.put("in/a.txt", b"other")
    assert folder.get("in/a.txt") == b"hello"
    assert folder.replace("in/a.txt", b"newer!") != first
    assert folder.get("in/a.txt") == b"newer!"
    assert folder.read_range("in/a.txt", 1, 3) == b"ew"


def test_the_list_has_names_sizes_and_the_tags_that_uploads_returned(folder):
    small = folder.put("a/x", b"1")
    odd = folder.replace(ODD, b"22")
    big = folder.replace("big", (bytes([n]) * (8 << 20) for n in range(5)), PARTS)
    folder.put("ab", b"")
    found = folder.list()
    assert {name: size for name, (size, _) in found.items()} == {"a/x": 1, ODD: 2, "big": PARTS, "ab": 0}
    assert (found["a/x"][1], found[ODD][1], found["big"][1]) == (small, odd, big)
    assert folder.list("a") == {"a/x": (1, small)}
    assert folder.get(ODD) == b"22"
    assert folder.read_range("big", (8 << 20) - 1, (8 << 20) + 1) == b"\0\1"


def test_deletes_skip_what_is_missing(folder):
    folder.put("a", b"1")
    folder.put(ODD, b"1")
    folder.put("kept", b"1")
    folder.delete(["a", "no-such", ODD])
    assert set(folder.list()) == {"kept"}
    with pytest.raises(ObjectMissing, match="a does not exist"):
        folder.get("a")


def test_a_list_of_many_objects_is_whole(store, folder):
    number = (
        103 if store.scheme == "gs" else 1003
    )  # more than one page of moto and of our Google; Azurite has pages of 5000
    names = [f"{one:04d}" for one in range(number)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: folder.put(name, b""), names))
    assert sorted(folder.list()) == names
    folder.delete(folder.list())
    assert folder.list() == {}


def test_a_missing_bucket_is_named_and_is_not_tried_for_ever(store):
    from phalanx.node.data.object_store import ObjectFolder

    place = store.place.replace(BUCKET, "no-such-bucket")
    with pytest.raises(ObjectsRefused, match="no such bucket"):
        ObjectFolder(f"{place}/x").put("a", b"1")
    with pytest.raises(DatasetInvalid, match="no such bucket"):
        open_source(f"{place}/x", {}).list()


def test_a_store_that_refuses_is_told_from_one_that_fails(store, folder):
    folder.put("a", b"1")
    store.fault = lambda _method, _path, _body: 403
    with pytest.raises(ObjectsRefused, match="may not use it"):
        folder.get("a")
    with pytest.raises(ObjectsRefused, match="may not use it"):
        folder.put("b", b"1")
    failed: list[str] = []

    def fails_twice(_method, path, _body):
        failed.append(path)
        return 500 if len(failed) <= 2 else 0

    store.fault = fails_twice
    assert folder.get("a") == b"1"
    assert len(failed) == 3


def test_a_dataset_is_read_as_it_was_listed(store, folder):
    folder.put("train/a.bin", b"0123456789")
    folder.put("train/in/b.bin", b"b")
    folder.put("trainer/c.bin", b"c")
    place = folder.url
    source = open_source(f"{place}/train", {})
    dataset = source.list()
    assert [(file.path, file.size_bytes) for file in dataset.files] == [("a.bin", 10), ("in/b.bin", 1)]
    assert source.read(dataset.files[0], 2, 4) == b"2345"
    single = open_source(f"{place}/train/a.bin", {})
    assert single.list().single
    assert single.read(single.list().files[0], 0, 3) == b"012"
    old = dataset.files[0]
    with pytest.raises(DatasetInvalid, match="changed"):
        source.read(DataFile(old.path, old.size_bytes, '"another" 1'), 0, 2)
    folder.replace("train/a.bin", b"another---")
    with pytest.raises(DatasetInvalid, match="changed"):
        source.read(old, 0, 2)
    with pytest.raises(DatasetInvalid, match="no files"):
        open_source(f"{place}/nothing", {}).list()


def test_a_store_that_does_not_answer_is_tried_again_later(store):
    with pytest.MonkeyPatch.context() as patch:
        for name, text in variables_of(store.scheme, "http://127.0.0.1:1").items():
            patch.setenv(name, text)
        source = open_source(f"{store.place}/x", {})
        with pytest.raises(SourceUnavailable):
            source.list()


# The same server by the names of each cloud's own tools, for obstore and for rclone.
def _spellings(store):
    account, key = "devstoreaccount1", store.variables.get("AZURE_STORAGE_ACCOUNT_KEY", "")
    blobs, sas = f"{store.url}/{account}", account_signature()
    return {
        "s3": [{**store.variables, "AWS_ENDPOINT_URL_S3": store.url, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}],
        "gs": [
            {"STORAGE_EMULATOR_HOST": store.url.removeprefix("http://")},
            {"STORAGE_EMULATOR_HOST": f"{store.url}/", "GOOGLE_APPLICATION_CREDENTIALS": "/nowhere"},
            {"GOOGLE_BASE_URL": store.url, "GOOGLE_SKIP_SIGNATURE": "true"},
            {"GOOGLE_BASE_URL": store.url, "GOOGLE_BEARER_TOKEN": "token"},
        ],
        "az": [
            {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName={account};AccountKey={key};BlobEndpoint={blobs};"},
            {"AZURE_STORAGE_ACCOUNT": account, "AZURE_STORAGE_KEY": key, "AZURE_STORAGE_SERVICE_ENDPOINT": blobs},
            {
                "AZURE_STORAGE_ACCOUNT_NAME": account,
                "AZURE_STORAGE_SAS_TOKEN": f"?{sas}",
                "AZURE_STORAGE_ENDPOINT": blobs,
            },
            {
                "AZURE_STORAGE_CONNECTION_STRING": f"AccountName={account};SharedAccessSignature={sas};BlobEndpoint={blobs}"
            },
            {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": store.url},
            {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true", "AZURITE_BLOB_STORAGE_URL": store.url},
        ],
    }[store.scheme]


def test_the_variables_of_each_cloud_s_tools_name_an_own_server(store, folder):
    from phalanx.node.data.object_store import ObjectFolder

    folder.put("x", b"hello")
    rclone = find_rclone(os.environ["PATH"])
    for number, spelling in enumerate(_spellings(store)):
        with pytest.MonkeyPatch.context() as patch:
            for name in store.variables:
                patch.delenv(name)
            for name, text in spelling.items():
                patch.setenv(name, text)
            same = ObjectFolder(folder.url)
            assert same.get("x") == b"hello", spelling
            same.put(f"by-{number}", b"1")
            if rclone is not None:
                words = [rclone, "cat", "data:x", "--retries", "1", "--low-level-retries", "1"]
                variables = {"RCLONE_CONFIG": os.devnull, **remote_variables(folder.url, spelling)}
                done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60, check=False)
                assert done.stdout == "hello", (spelling, done.stderr)
    assert len(folder.list()) == 1 + len(_spellings(store))


def test_a_service_account_of_google_signs_for_obstore_and_gets_a_token_for_rclone(store, folder):
    from phalanx.node.data.object_store import ObjectFolder

    if store.scheme != "gs":
        pytest.skip("only Google has them")
    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    account = {
        "type": "service_account",
        "project_id": "p",
        "client_email": "trainer@p.iam.gserviceaccount.com",
        "private_key_id": "1",
        "private_key": made.private_bytes(*form).decode(),
        "token_uri": f"{store.url}{TOKEN_PATH}",
    }
    variables = {"GOOGLE_BASE_URL": store.url, "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}
    with pytest.MonkeyPatch.context() as patch:
        for name in store.variables:
            patch.delenv(name)
        for name, text in variables.items():
            patch.setenv(name, text)
        ObjectFolder(folder.url).put("x", b"hello")
    assert len(store.authorizations) == 1
    assert store.authorizations.pop().startswith("Bearer ey"), "a token that the account's key has signed"
    rclone = find_rclone(os.environ["PATH"])
    if rclone is None:
        pytest.skip("rclone is not installed: make mount-tools")
    words = [rclone, "cat", "data:x", "--retries", "1", "--low-level-retries", "1"]
    given = {"RCLONE_CONFIG": os.devnull, **remote_variables(folder.url, variables)}
    done = subprocess.run(words, env=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "hello", done.stderr
    assert store.authorizations == {"", "Bearer exchanged"}
