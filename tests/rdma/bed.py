"""RDMA bed: two small virtual machines on one private link, whose kernel has RDMA in software, and one program in each.

The machines of CI have no RDMA in their kernel, so these bring one: Debian's, under QEMU without hardware help. A guest
sees the host's root read-only, so that Python and what is built here run in it as they are, and one folder read-write.
It proves that reads are right, and when ends are noticed; how fast they are it cannot show.

`make rdma-bed` builds the image (tests/rdma/image.sh). `why_not` says what is missing, for tests to skip by.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMAGE = ROOT / "build/rdma-bed"
PYVERBS = IMAGE / "pyverbs"
DEBIAN_PYTHON = Path("/usr/bin/python3")
"""The one that Debian's pyverbs is built for."""
MEMORY_MIB = 768
POLL_S = 0.05
LINK_MTU = 9000


class GuestFailed(Exception):
    """A guest did not end well; the message has what it wrote."""


def why_not() -> str | None:
    """Reason why there is no bed here, None if there is one."""
    for program in ("qemu-system-x86_64", "tc", "rdma"):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin") is None:
            return f"no {program}: see python3 tests/programs.py"
    if os.geteuid() != 0:
        return "it takes root: a guest sees the files of whoever starts it as root's"
    try:
        from fleetstart.native import _rdma  # noqa: F401
    except ImportError as error:
        return f"{error}: apt install libibverbs-dev, then build again (touch native/CMakeLists.txt; make dev)"
    built = subprocess.run([HERE / "image.sh", IMAGE], capture_output=True, text=True)
    return None if built.returncode == 0 else (built.stderr.strip().splitlines() or ["image.sh failed"])[-1]


def run_guests(folder: Path, programs: tuple[Path, Path], timeout_s: float) -> None:
    """Runs a program in each guest, its argument the folder, until both have ended. Errors: GuestFailed."""
    job = "".join(
        [
            f"cd {shlex.quote(str(ROOT))}\nexport PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1\ncase $BED_RANK in\n",
            *(
                f"{rank}) exec {shlex.quote(sys.executable)} -X faulthandler -m {_module(program)} "
                f"{shlex.quote(str(folder))} ;;\n"
                for rank, program in enumerate(programs)
            ),
            "esac\n",
        ]
    )
    (folder / "job.sh").write_text(job)
    guests: list[subprocess.Popen[bytes]] = []
    try:
        guests.extend(_start(rank, folder) for rank in (0, 1))
        _await_all(guests, folder, time.monotonic() + timeout_s)
    finally:
        for guest in guests:
            guest.kill()
            guest.wait()


def _module(program: Path) -> str:
    return ".".join(program.relative_to(ROOT).with_suffix("").parts)


def _start(rank: int, folder: Path) -> subprocess.Popen[bytes]:
    share = "security_model=none,multidevs=remap"
    kernel = f"console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off net.ifnames=0 bed_rank={rank} bed_dir={folder}"
    link = f"local.type=unix,local.path={folder}/link.{rank},remote.type=unix,remote.path={folder}/link.{1 - rank}"
    command = [
        *("qemu-system-x86_64", "-accel", "tcg,thread=multi"),
        # Without erms and fsrm the guest's kernel copies by words: "rep movsb" is emulated byte by byte.
        *("-cpu", "max,-erms,-fsrm,-la57", "-smp", "1", "-m", str(MEMORY_MIB)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", f"{IMAGE}/vmlinux", "-initrd", f"{IMAGE}/initrd", "-append", kernel),
        *("-serial", f"file:{folder}/console.{rank}", "-device", "virtio-rng-pci", "-device", "virtio-serial-pci"),
        *("-chardev", f"file,id=status,path={folder}/status.{rank}"),
        *("-device", "virtserialport,chardev=status,name=status"),
        *("-virtfs", f"local,path=/,mount_tag=root,readonly=on,{share}"),
        *("-virtfs", f"local,path={folder},mount_tag=dir,{share}"),
        *("-netdev", f"dgram,id=link,{link}"),
        *("-device", f"virtio-net-pci,netdev=link,mac=52:54:00:00:00:0{rank + 1},host_mtu={LINK_MTU},romfile="),
    ]
    with (folder / f"qemu.{rank}").open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _await_all(guests: list[subprocess.Popen[bytes]], folder: Path, until_s: float) -> None:
    while any(guest.poll() is None for guest in guests):
        if time.monotonic() >= until_s:
            raise GuestFailed(f"the guests have not ended in time\n{_outputs(folder)}")
        time.sleep(POLL_S)
    for rank in (0, 1):
        status = _text(folder / f"status.{rank}").strip()
        if status != "0":
            raise GuestFailed(f"guest {rank} ended with status {status or 'unknown'}\n{_outputs(folder)}")


def _outputs(folder: Path) -> str:
    names = [f"{kind}.{rank}" for rank in (0, 1) for kind in ("output", "console", "qemu")]
    return "\n".join(f"── {name}\n{_text(folder / name)[-4000:]}" for name in names)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
