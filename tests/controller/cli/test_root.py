"""The command line as a whole: verbs, help, words for errors, exit codes, and that help stays light."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetstart.controller.cli.output import EXIT_CODES, FAILED, INTERRUPTED, NOT_FOUND, OK, UNREACHABLE, USAGE
from fleetstart.controller.cli.root import VERBS, run

FS = Path(sys.executable).with_name("fs")


def test_help_lists_every_verb_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == OK
    out = capsys.readouterr().out
    assert all(f"\n  {verb} " in out for verb in VERBS)
    assert all(f"\n  {code} " in out for code in EXIT_CODES)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == OK
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: fs {verb}")
    assert "--json" in out
    assert len(out.splitlines()[2].strip()) > 10
    assert "..." not in out.partition("\nCommands:")[2], "a sentence is cut"


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from fleetstart.controller.cli.root import run; run(['--help'])\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(result.stderr.split())
    assert not loaded & {"httpx", "rich", "asyncio", "torch", "redis", "starlette", "boto3", "ssl", "numpy"}


def test_a_verb_that_reads_records_loads_no_planner() -> None:
    program = (
        "import sys, fleetstart.controller.cli.commands.status, fleetstart.controller.cli.commands.up\n"
        "print(*sorted(name for name in sys.modules if name.startswith('fleetstart.controller.planner.')))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {name.rpartition(".")[2] for name in result.stdout.split()} == {"error_margins", "estimates"}


INTERRUPTED_WHILE_IT_IMPORTS = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from fleetstart.controller.cli import main
main()
"""


@pytest.mark.parametrize("module", ["click", "fleetstart.controller.cli.commands.dev"])
def test_ctrl_c_ends_a_verb_that_is_being_imported_without_a_traceback(module: str) -> None:
    program = [sys.executable, "-c", INTERRUPTED_WHILE_IT_IMPORTS, "dev", module]
    result = subprocess.run(program, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (INTERRUPTED, "", "")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["stauts"], USAGE, "did you mean `fs status`?"),
        (["zzz"], USAGE, "see `fs --help`"),
        (["invoke"], USAGE, "Missing argument"),
        (["ls", "--nope"], USAGE, "No such option"),
        (["up", "--port", "99999"], USAGE, "99999"),
        (["ls"], UNREACHABLE, "fs up"),
        (["ls", "--url", "http://127.0.0.1:1"], UNREACHABLE, "http://127.0.0.1:1 does not answer"),
        (["ls", "--url", "http://[::1"], USAGE, "'http://[::1' is not the URL of a server: Invalid IPv6 URL"),
        (["ls", "--url", "http://x:99999"], USAGE, "Port out of range"),
        (["ls", "--url", "http://a\x01b"], USAGE, "is not the URL of a server"),
        (["shell", "f", "--url", "http://[::1"], USAGE, "is not the URL of a server"),
        (["deploy", "nowhere.py"], NOT_FOUND, "nowhere.py does not exist"),
        (["invoke", "f", "not json"], USAGE, "not JSON"),
        (["invoke", "f", "@nowhere"], NOT_FOUND, "no file nowhere"),
        (["invoke", "f", "{}", "-H", "nocolon"], USAGE, "NAME: VALUE"),
        (["invoke", "f", "{}", "-H", "Content-Length: 5"], USAGE, "follows from the body"),
        (["rm", "f\udcff", "--url", "http://127.0.0.1:1"], USAGE, "'f\\udcff' is not UTF-8"),
        (["usage", "--since", "yesterday"], USAGE, "neither an age"),
        (["scale", "f", "--rate", "inf"], USAGE, "inf is no number of anything"),
        (["scale", "f", "--keep-alive", "nan"], USAGE, "nan is no number of anything"),
    ],
)
def test_what_cannot_be_done_is_said_with_its_exit_code(
    arguments: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--home", str(tmp_path), *arguments]) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_errors_are_json_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--home", str(tmp_path), "ls", "--json"]) == UNREACHABLE
    assert capsys.readouterr().err.startswith('{"error":{"code":"unreachable"')


def test_json_may_be_asked_before_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FS_HOME", str(tmp_path))
    assert run(["--json", "ls"]) == UNREACHABLE
    assert capsys.readouterr().err.endswith('or name one with --url or FS_URL"}}\n')
    assert run(["--json"]) == USAGE


def test_a_missing_handler_needs_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "handler.py").write_text("x = 1\n")
    assert run(["--home", str(tmp_path), "deploy", str(tmp_path / "handler.py")]) == 1
    assert "declares no function" in capsys.readouterr().err


def test_down_without_a_server_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--home", str(tmp_path / "none"), "down"]) == OK
    assert "nothing runs" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_doctor_has_advice_for_what_is_not_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run(["--home", str(blocked), "doctor", "--no-measure"]) == 1
    out = capsys.readouterr().out
    assert "is not writable" in out
    assert "→ set FS_HOME elsewhere" in out
    assert "GB/s" not in out


def test_a_reader_that_has_closed_stdout_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run([FS, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (OK, "")


def test_a_full_disk_under_stdout_is_told_without_a_traceback() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([FS, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == FAILED
    assert result.stderr.startswith("error: a file, or stdout: No space left on device\n")
    assert "Traceback" not in result.stderr


def test_a_locale_without_an_arrow_gets_its_escape(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "FS_HOME": str(tmp_path)}
    result = subprocess.run([FS, "doctor", "--no-measure"], capture_output=True, env=environment)
    assert b"\\u2192" in result.stdout
    assert result.stderr == b""
