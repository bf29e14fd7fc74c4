"""Runs all tests: the unit tests, then the end-to-end tests. `make test` does.

    python -m tests.runner.suites [--second-run] [--isolation DRIVER PATH...]

With `--isolation` it runs end-to-end tests with that driver, and no unit tests (`make driver-tests`).

With `--second-run`, as CI has it, the files of failed tests run once more, alone, if these are few: a race that shows
once in thousands of tests stops no change that it has nothing to do with. A test that fails again has failed. One that
passes is named as flaky at the end of the output, and its race is still to be found (`make burn-in`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

UNIT_TESTS = ("-m", "not e2e", "-n", "4", "--dist", "worksteal")
"""Four at a time on any machine, as most tests wait for something now and then."""
END_TO_END_TESTS = ("-m", "e2e", "-n", "4", "--dist", "loadscope", "--no-loadscope-reorder")
"""The test beds, which leave three quarters of the cores idle, run beside the other systems."""
FLAKY_MOST = 4
"""More failures than this are no coincidence: they are not tried again."""
FAILED_TESTS = 1
"""Exit code of pytest. All others but 0 mean that the run itself broke off, or had no tests."""


def lastfailed_file(cache: Path) -> Path:
    return cache / "v" / "cache" / "lastfailed"


def failed_tests(cache: Path) -> list[str]:
    """Node ids of the tests that failed when they ran last, as pytest's cache has them."""
    try:
        return sorted(json.loads(lastfailed_file(cache).read_text()))
    except FileNotFoundError:
        return []


def run(root: Path, *arguments: str) -> int:
    """Exit code of a run of pytest, which names what took longest."""
    command = [sys.executable, "-m", "pytest", "--quiet", "--durations=25", *arguments]
    return subprocess.run(command, cwd=root, check=False).returncode


def run_all(root: Path, suites: Sequence[Sequence[str]], *, second_run: bool, options: Sequence[str] = ()) -> int:
    """Exit code of all suites, with the failed tests tried again where that is asked for. All runs have `options`."""
    cache = root / ".pytest_cache"
    lastfailed_file(cache).unlink(missing_ok=True)
    codes = [run(root, *suite, *options) for suite in suites]
    if broken := [code for code in codes if code not in (0, FAILED_TESTS)]:
        return broken[0]
    if FAILED_TESTS not in codes:
        return 0
    failed = failed_tests(cache)
    if not second_run or not 0 < len(failed) <= FLAKY_MOST:
        return FAILED_TESTS
    files = sorted({test.partition("::")[0] for test in failed})
    print(f"\nonce more, alone: {', '.join(files)}", flush=True)
    if code := run(root, *files, *options):
        return code
    for test in failed:
        print(f"FLAKY: {test} failed, and passed when it ran again", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--second-run", action="store_true", help="try the files of few failed tests once more")
    parser.add_argument("--isolation", help="run end-to-end tests with this driver")
    parser.add_argument("paths", nargs="*", help="the end-to-end tests to run with it")
    arguments = parser.parse_args()
    root, second_run = Path(__file__).parents[2], arguments.second_run
    if arguments.isolation is None:
        return run_all(root, (UNIT_TESTS, END_TO_END_TESTS), second_run=second_run)
    options = ("--isolation", arguments.isolation)
    return run_all(root, [(*END_TO_END_TESTS, *arguments.paths)], second_run=second_run, options=options)


if __name__ == "__main__":
    sys.exit(main())
