from __future__ import annotations

import asyncio
import signal
import subprocess

from fleetstart.prefetcher.processes.forkserver_client import ForkServer
from tests.servers import until


def test_a_fork_server_is_not_waited_for_while_it_imports() -> None:
    """Its node ends, and it reads its socket, by which it would notice, only when it has imported everything."""

    async def launched_and_ended() -> subprocess.Popen[bytes]:
        imports = ("-n1", "-r1", "import time; time.sleep(600)")
        server = ForkServer(module="timeit", arguments=imports, env={}, changed=lambda: None, end_s=0.0)
        running = asyncio.create_task(server.run())
        await until(lambda: server._popen is not None or running.done())
        if running.done():
            await running  # says why it was not launched
        process = server._popen
        assert process is not None
        running.cancel()
        await asyncio.wait([running])
        return process

    assert asyncio.run(launched_and_ended()).returncode == -signal.SIGKILL
