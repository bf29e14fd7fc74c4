"""Object store of the benchmarks: `range_server.c`, compiled on the spot and run over a folder of buckets."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

BUCKET = "bench"


@contextlib.contextmanager
def serving(folder: Path, *, bytes_per_s: float = 0) -> Iterator[str]:
    """Serves a folder, whose folders are buckets; gives the URL. 0 bytes a second: as fast as it goes."""
    with tempfile.TemporaryDirectory(prefix="fs-bench-") as place:
        program = Path(place) / "range_server"
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-pthread", source, "-o", program], check=True)
        process = subprocess.Popen(
            [program, folder, str(bytes_per_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait()


def credentials(url: str) -> dict[str, str]:
    """The environment of a client: any key will do."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
