"""What rclone gets to read a source: the remote, the job's credentials, and no other setting of the job."""

import json

import pytest

from phalanx.node.data.rclone_remote import only_file, parent_with_file, remote_variables
from phalanx.node.data.store_access import credential_variable, obstore_settings


def test_credentials_and_address_are_variables():
    found = remote_variables(
        "s3://b/train/",
        {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "eu-1", "HF_TOKEN": "t", "X": "1"},
    )
    assert found["RCLONE_CONFIG_DATA_REMOTE"] == ":s3:b/train"
    assert found["RCLONE_S3_PROVIDER"] == "AWS"
    assert found["RCLONE_S3_REGION"] == "eu-1"
    assert found["RCLONE_S3_ENV_AUTH"] == "true"
    assert found["AWS_SECRET_ACCESS_KEY"] == "key"
    assert not {"HF_TOKEN", "X", "RCLONE_S3_ENDPOINT"} & found.keys()


@pytest.mark.parametrize(
    ("source", "variables", "expected"),
    [
        (
            "s3://b",
            {"AWS_ENDPOINT_URL": "http://h:1", "AWS_SKIP_SIGNATURE": "true"},
            {"RCLONE_S3_PROVIDER": "Other", "RCLONE_S3_ENDPOINT": "http://h:1", "RCLONE_S3_ENV_AUTH": "false"},
        ),
        (
            "s3://b",
            {"AWS_ENDPOINT_URL": "http://h:1", "RCLONE_S3_PROVIDER": "Ceph"},
            {"RCLONE_S3_PROVIDER": "Ceph"},
        ),
        (
            "gs://b/p",
            {"GOOGLE_SERVICE_ACCOUNT": "/k.json"},
            {"RCLONE_CONFIG_DATA_REMOTE": ":gcs:b/p", "RCLONE_GCS_SERVICE_ACCOUNT_FILE": "/k.json"},
        ),
        ("gs://b", {"GOOGLE_SKIP_SIGNATURE": "true"}, {"RCLONE_GCS_ANONYMOUS": "true"}),
        (
            "az://c/p",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "k"},
            {
                "RCLONE_CONFIG_DATA_REMOTE": ":azureblob:c/p",
                "RCLONE_AZUREBLOB_ACCOUNT": "a",
                "RCLONE_AZUREBLOB_KEY": "k",
            },
        ),
        (
            "az://c",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_SAS_TOKEN": "?sig=x"},
            {"RCLONE_AZUREBLOB_SAS_URL": "https://a.blob.core.windows.net/?sig=x"},
        ),
        (
            "gs://b/p",
            {"STORAGE_EMULATOR_HOST": "h:1", "GOOGLE_SERVICE_ACCOUNT": "/k.json"},
            {"RCLONE_GCS_ENDPOINT": "http://h:1/storage/v1/", "RCLONE_GCS_ANONYMOUS": "true"},
        ),
        (
            "az://c",
            {
                "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k==;EndpointSuffix=core.x"
            },
            {"RCLONE_AZUREBLOB_KEY": "k==", "RCLONE_AZUREBLOB_ENDPOINT": "https://a.blob.core.x"},
        ),
        (
            "az://c",
            {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=old", "AZURE_STORAGE_SAS_TOKEN": "?sig=x"},
            {"RCLONE_AZUREBLOB_SAS_URL": "https://a.blob.core.windows.net/?sig=x"},
        ),
        (
            "https://example.org/d",
            {},
            {"RCLONE_CONFIG_DATA_TYPE": "http", "RCLONE_CONFIG_DATA_URL": "https://example.org/d/"},
        ),
    ],
)
def test_each_store_gets_its_options(source, variables, expected):
    assert expected.items() <= remote_variables(source, variables).items()


def test_a_job_opens_no_port_and_lifts_no_bound():
    given = {"RCLONE_RC": "true", "RCLONE_VFS_CACHE_MAX_SIZE": "1T", "RCLONE_CONFIG": "/etc/x", "RCLONE_S3_ACL": "a"}
    assert not {"RCLONE_RC", "RCLONE_VFS_CACHE_MAX_SIZE", "RCLONE_CONFIG"} & remote_variables("s3://b", given).keys()


def test_obstore_gets_what_it_does_not_read_by_itself():
    assert obstore_settings("s3", {"AWS_ENDPOINT_URL": "http://h"}) == {}
    assert obstore_settings("gs", {}) == {}
    assert obstore_settings("gs", {"GOOGLE_SKIP_SIGNATURE": "true"}) == {}
    emulated = obstore_settings("gs", {"STORAGE_EMULATOR_HOST": "h:1/"})
    assert emulated["base_url"] == "http://h:1"
    assert json.loads(emulated["service_account_key"])["disable_oauth"] is True
    azurite = obstore_settings("az", {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"})
    assert azurite["endpoint"] == "http://127.0.0.1:10000/devstoreaccount1"
    assert azurite["account_name"] == "devstoreaccount1"
    assert credential_variable("az://c/x") == "AZURE_STORAGE_ACCOUNT_KEY"


def test_the_filter_of_one_file_is_its_name_alone():
    assert parent_with_file("s3://b/p/x.tar") == ("s3://b/p", "x.tar")
    assert only_file('a[1]*,"x"') == {"RCLONE_INCLUDE": '"/a\\[1\\]\\*,""x"""'}
