"""The AWS account that a job runs in: its role, its bucket, and the upload of what the job runs."""

import contextlib
import tarfile
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.imports import require

_LEFT_OUT = ("__pycache__", ".git", ".venv", ".ipynb_checkpoints")  # of the script's folder


class Account:
    """The account of a profile or of keys, in a region.

    Args:
        region: The region.
        profile: A profile of `~/.aws`; `None` for what boto3 finds.
        keys: A key and its secret, which count before the profile; `None` where there are none.

    Raises:
        ConfigurationError: If there is no such profile, or one of the keys is missing.
        MissingPackageError: If the extra `sagemaker` is not installed.
    """

    def __init__(self, region: str, profile: str | None, keys: tuple[str | None, str | None] = (None, None)) -> None:
        boto3 = require("boto3", "sagemaker")
        if (keys[0] is None) != (keys[1] is None):
            raise ConfigurationError("--aws_access_key_id and --aws_secret_access_key belong together. Give both.")
        with _refusals():
            self._session = boto3.Session(*keys, region_name=region, profile_name=None if keys[0] else profile)
        self._region = region

    def client(self, service: str) -> Any:
        """Return boto3's client of a service."""
        return self._session.client(service)

    def role(self, name: str) -> str:
        """Return the ARN of a role."""
        if name.startswith("arn:"):
            return name
        with _refusals():
            return self.client("iam").get_role(RoleName=name)["Role"]["Arn"]

    def bucket(self) -> str:
        """Return SageMaker's bucket of this account; the first job makes it."""
        with _refusals():
            name = f"sagemaker-{self._region}-{self.client('sts').get_caller_identity()['Account']}"
            s3 = self.client("s3")
            if name not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
                is_default = self._region == "us-east-1"  # which must not be named
                place = {} if is_default else {"CreateBucketConfiguration": {"LocationConstraint": self._region}}
                s3.create_bucket(Bucket=name, **place)
        return name

    def upload(self, where: str, folder: Path, start: str) -> None:
        """Upload a folder and the commands that start it to `where`/source."""
        bucket, _, prefix = where.removeprefix("s3://").partition("/")
        with tempfile.TemporaryFile() as packed, _refusals():
            with tarfile.open(fileobj=packed, mode="w:gz") as archive:
                archive.add(folder, arcname=".", filter=_without_caches)
            packed.seek(0)
            s3 = self.client("s3")
            s3.upload_fileobj(packed, bucket, f"{prefix}/source/source.tar.gz")
            s3.put_object(Bucket=bucket, Key=f"{prefix}/source/launch.sh", Body=start.encode())

    def submit(self, job: Mapping[str, Any]) -> None:
        """Submit a training job."""
        with _refusals():
            self.client("sagemaker").create_training_job(**job)


def _without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(member.name).name in _LEFT_OUT else member


@contextlib.contextmanager
def _refusals() -> Generator[None]:
    """Say what AWS refuses without its traceback."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, Boto3Error, ClientError) as error:
        raise ConfigurationError(
            f"AWS refused the job: {error} Look at profile, region, iam_role_name and additional_args in the "
            "configuration file, and at the rights of the account."
        ) from error
