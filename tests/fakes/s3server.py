"""A real S3 server on loopback: moto's, in a process of its own, with users and their rights."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
_START_S = 300.0


@dataclass(slots=True)
class S3Server:
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def client(self, service: str = "s3", key: str = KEY, secret: str = SECRET) -> Any:
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
        )

    def start(self) -> None:
        """Start the server. Its content is empty."""
        words = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=300):
                    return
            except OSError:
                assert self.process.poll() is None, "the S3 server ended"
                assert time.monotonic() < deadline, "the S3 server did not start"
                time.sleep(0.1)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(300)
        self.process = None

    def reader(self) -> tuple[str, str]:
        """Make a user who may only read, and check rights from now on."""
        iam = self.client("iam")
        iam.create_user(UserName="reader")
        rights = {"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [rights]})
        iam.put_user_policy(UserName="reader", PolicyName="p", PolicyDocument=document)
        made = iam.create_access_key(UserName="reader")["AccessKey"]
        self.check_rights(True)
        return made["AccessKeyId"], made["SecretAccessKey"]

    def check_rights(self, checks: bool) -> None:
        count = b"0" if checks else b"1000000000"
        ask = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth", count, {"Content-Type": "text/plain"}
        )
        with urllib.request.urlopen(ask, timeout=300):
            pass

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        client = self.client()
        found = {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents", []):
                body = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"]
                found[entry["Key"]] = body.read()
        return found


@contextmanager
def s3_server(bucket: str = "bucket") -> Iterator[S3Server]:
    """Run a server with an empty bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = S3Server(port=free.getsockname()[1])
    server.start()
    try:
        server.client().create_bucket(Bucket=bucket)
        yield server
    finally:
        server.stop()
