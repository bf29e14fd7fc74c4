"""`python -m fleetstart.images.make_bucket`: makes the bucket of FS_STORE, once its S3 server answers.

Exit codes: 0 the bucket is there, 1 it cannot be made, 2 FS_STORE names none.
"""

from __future__ import annotations

import os
import sys
import time

LIMIT_S = 60.0
PAUSE_S = 0.5


def main(store: str) -> int:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    if not store.startswith("s3://"):
        print(f"FS_STORE is {store!r}: it names no bucket", file=sys.stderr)
        return 2
    bucket = store.removeprefix("s3://").split("/")[0]
    client = boto3.client("s3", config=Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1}))
    ends_s = time.monotonic() + LIMIT_S
    while True:
        try:
            if bucket not in [one["Name"] for one in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=bucket)
            return 0
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > ends_s:
                print(f"the bucket {bucket} cannot be made: {error}", file=sys.stderr)
                return 1
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main(os.environ.get("FS_STORE", "")))
