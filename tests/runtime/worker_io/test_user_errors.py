"""What a log shows of an exception: the user's lines, without ours that led there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetstart.runtime.sdk.context import context
from fleetstart.runtime.worker.entry_import import import_entry
from fleetstart.runtime.worker_io import user_errors


def below_this_file(error: BaseException) -> BaseException:
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)


def test_a_log_begins_with_the_users_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "user_module.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(ValueError, match="Expecting property name") as caught:
        import_entry("user_module:handler", str(tmp_path))
    user_errors.log(below_this_file(caught.value), "the start failed:")
    lines = capfd.readouterr().err.splitlines()
    assert lines[:3] == [
        "the start failed:",
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/user_module.py", line 3, in <module>',
    ]
    assert [line for line in lines if "json/decoder.py" in line], "libraries that they call are shown"
    assert lines[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_an_error_of_ours_alone_is_shown_whole(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError) as caught:
        _ = context.id
    user_errors.log(below_this_file(caught.value), "failed:")
    assert "runtime/sdk/context.py" in capfd.readouterr().err
