"""What a new user met on the first day, trying everything from the documentation alone, and the test that shows it now.

Each handler that was written is a block of a page, which `test_commands` deploys and calls. Each stumble, each message
that misled, and each weak point of the dashboard has the tests that would fail if it came back.
"""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.docs.pages import NAMES, ROOT, blocks

COMMANDS = "docs/test_commands.py::test_each_command_works_as_printed"

HANDLERS = {
    "a numpy classifier from safetensors, without an import of torch": ("docs/recipes.md", "iris/handler.py"),
    "a torch model": ("docs/models.md", "answer/handler.py"),
    "generators, sync and async": ("docs/handlers.md", "steps/handler.py"),
    "an ASGI app": ("docs/handlers.md", "web/handler.py"),
    "a batch": ("docs/handlers.md", "lengths/handler.py"),
    "secret, environment, schedule, time zone": ("docs/security.md", "report/handler.py"),
    "a Hugging Face model by hand": ("docs/models.md", "meaning/handler.py"),
    "a Hugging Face model by name": ("docs/models.md", "similar/handler.py"),
    "a data file beside the handler": ("docs/handlers.md", "greetings/handler.py"),
}
"""Page and file of a handler of each kind. A function cannot ask for a GPU yet: see `STUMBLES`."""
OF_THE_STRANGER = ("docs/handlers.md", "tidy/handler.py")
"""A function with packages: building them needs a package index, which the stranger's day has (`tests/stranger`)."""

STUMBLES = {
    "packages of a function": (
        "e2e/deploys/test_layers.py::test_two_functions_with_two_versions_of_one_package_answer_with_their_own",
        "e2e/deploys/test_layers.py::test_a_file_beside_the_handler_is_taken",
        "e2e/deploys/test_layers.py::test_a_deploy_warns_of_imports_that_workers_will_not_find",
    ),
    "a GPU that no node has is refused by name": (
        "controller/cli/handler/source/test_declarations.py::test_who_asks_for_a_device_by_another_name_is_told_ours",
        "e2e/calls/test_devices.py::test_devices_that_no_node_has_are_refused_with_those_that_there_are",
    ),
    "a first deploy of what cannot start fails, and the failure stays visible": (
        "e2e/deploys/test_versions.py::test_a_first_version_whose_load_raises_fails_the_deploy_with_its_traceback",
        "controller/state/test_traffic.py::test_the_last_failure_is_told_until_a_later_start_succeeds",
        "e2e/operation/test_dashboard.py::test_every_page_fits_its_window",
    ),
    "the numbers of a model of Hugging Face": (
        "runtime/weights/test_module_loading.py::test_families_of_transformers_compute_what_they_compute_there",
        "runtime/weights/test_module_loading.py::test_a_value_that_cannot_be_made_is_named_and_never_guessed",
        "runtime/pretrained/test_text.py::test_a_classifier_answers_as_the_pipeline_does",
    ),
    "numpy weights without torch": (
        "runtime/weights/test_numpy_arrays.py::test_a_worker_has_both_and_never_imports_torch",
    ),
    "an ASGI app: how it is declared, and URLs that lead back to it": (
        "controller/cli/handler/source/test_declarations.py::test_an_app_is_told_how_it_becomes_a_function",
        "runtime/handlers/test_mounting.py::test_urls_and_redirects_stay_below_the_mount_point",
        "e2e/operation/test_reverse_proxies.py::test_the_callers_address_and_protocol_are_known_and_cannot_be_forged",
    ),
    "what the engine cannot run is refused at the deploy": (
        "controller/cli/weights/test_engine_support.py::test_a_deploy_of_it_sends_nothing",
        "controller/cli/weights/test_engine_support.py::test_a_deploy_of_another_tasks_model_sends_nothing",
    ),
    "a store that cannot be used": (
        "controller/storage/test_probe.py::test_addresses_and_credentials_are_told_apart",
        "controller/cli/local/test_up.py::test_status_and_doctor_try_the_store_of_a_running_system",
        "controller/http/test_head_errors.py::test_no_error_ends_in_a_colon",
    ),
    "a Redis with a password, or a wrong one": (
        "controller/state/test_redis_probe.py::test_passwords_are_told_apart_and_never_shown",
        "controller/cli/local/test_up.py::test_backends_that_cannot_be_used_are_said_at_once_and_nothing_stays",
    ),
    "a second machine, and one that listens": (
        "controller/cli/local/test_node_join.py::test_a_second_machine_joins_serves_and_leaves",
        "controller/cli/local/test_up_listen.py::test_other_machines_get_in_with_tls_and_a_key",
    ),
    "FS_HOME/run that a cleaner removed": (
        "controller/cli/local/test_up.py::test_run_files_that_a_cleaner_removed_are_written_again",
        "controller/cli/local/test_up.py::test_down_finds_the_supervisor_by_the_lock_alone",
    ),
    "a call whose worker dies is not run again unasked": (
        "e2e/operation/test_kills.py::test_a_call_that_kills_its_worker_runs_as_often_as_its_function_says",
        "controller/gateway/dispatch/test_retry_policy.py::"
        "test_a_call_is_repeated_as_often_as_its_function_says_and_never_after_too_much_memory",
    ),
    "no network, and the setting that gives it": (
        "runtime/worker_io/test_network_hint.py::test_a_name_that_cannot_be_resolved_leads_to_the_setting",
    ),
    "a call that no worker took, on the dashboard": (
        "e2e/operation/test_dashboard.py::test_a_call_that_no_worker_took_has_the_reason_on_its_page",
    ),
    "a replay of a failed call": (
        "e2e/calls/test_invocations.py::test_a_replay_of_a_failed_call_does_not_differ_by_its_id",
    ),
    "predictions that are guesses": (
        "controller/cli/commands/test_explain.py::test_guesses_are_not_judged",
        "controller/cli/commands/test_explain.py::test_a_function_without_tokens_has_a_first_byte",
    ),
    "fs down while calls run": (
        "controller/cli/local/test_up.py::test_down_says_what_it_waits_for_and_need_not_wait",
        "controller/state/test_resilience.py::test_a_call_that_outlives_the_drain_time_is_answered_unavailable",
    ),
}

MESSAGES = {
    "options that a running system does not take": (
        "controller/cli/local/test_up.py::test_up_is_idempotent_and_down_leaves_nothing",
    ),
    "a port that is taken": ("controller/cli/local/test_up.py::test_a_port_that_is_taken_is_said_and_nothing_stays",),
    "a version that is not there": (
        "controller/cli/commands/test_deploy_and_call.py::test_an_unknown_version_is_not_an_unknown_function",
    ),
    "a field that is not there, and broken JSON from curl": (
        "runtime/handlers/test_typed.py::test_a_field_that_is_not_there_is_called_that",
        "runtime/handlers/test_typed.py::test_broken_json_of_curl_is_called_that",
    ),
    "a call past its deadline: the setting's name, and a log line in time": (
        "e2e/isolation/test_misbehaving.py::test_a_handler_that_hangs_ends_at_its_deadline_and_frees_its_slot",
    ),
    "more memory than any node has": (
        "e2e/deploys/test_changes.py::test_a_function_that_fits_no_node_is_told_so_at_once",
    ),
    "an audit log that begins with a rejection of the platform's own": (
        "e2e/operation/test_first_key.py::test_a_fresh_system_has_a_key_and_tells_how_to_call_with_it",
    ),
    "lines for curl that can be pasted": (
        "e2e/operation/test_first_key.py::test_a_fresh_system_has_a_key_and_tells_how_to_call_with_it",
        "controller/cli/test_curl_hint.py::test_a_function_is_called_with_the_plainest_that_it_takes",
    ),
    "fs --json VERB, and help without cut sentences": (
        "controller/cli/test_root.py::test_json_may_be_asked_before_the_verb",
        "controller/cli/test_root.py::test_every_verb_has_help_and_json",
    ),
    "settings whose live value is another": (
        "e2e/deploys/test_versions.py::test_config_says_where_the_live_version_differs",
    ),
    "a syntax error, a misspelt setting, a computed setting": (
        "controller/cli/handler/source/test_declarations.py::test_a_syntax_error_shows_line_column_and_caret",
        "controller/cli/handler/source/test_declarations.py::test_a_misspelt_setting_is_suggested",
        "controller/cli/handler/source/test_declarations.py::test_a_setting_that_cannot_be_read_is_refused_with_its_line",
    ),
    "a handler that raises, hangs, allocates without end, or leaves its process": (
        "e2e/isolation/test_misbehaving.py::test_a_handler_that_raises_is_told_with_its_line",
        "e2e/isolation/test_misbehaving.py::test_a_handler_that_allocates_without_end",
        "e2e/isolation/test_misbehaving.py::test_a_handler_that_ends_its_process",
    ),
    "weights that are a pickle, missing or truncated": (
        "e2e/deploys/test_bad_input.py::test_a_pickle_is_refused_by_name_and_by_content_and_never_opened",
        "e2e/deploys/test_bad_input.py::test_missing_weights",
        "e2e/deploys/test_bad_input.py::test_a_truncated_checkpoint",
    ),
    "a body that is too large": (
        "e2e/calls/test_hostile_http.py::test_a_client_is_told_why_its_large_body_was_refused",
    ),
    "a key with a typing mistake, a name with one": (
        "controller/auth/test_api_key.py::test_any_one_character_that_is_changed_is_noticed",
        "controller/cli/commands/test_deploy_and_call.py::test_an_unknown_function_is_suggested",
    ),
    "variables, settings, headers and error codes without a table": (
        "docs/test_reference.py::test_every_variable_is_in_the_tables",
        "docs/test_reference.py::test_every_setting_is_in_the_tables",
        "docs/test_reference.py::test_every_header_is_in_the_tables",
        "docs/test_reference.py::test_every_error_has_its_row",
    ),
}

DASHBOARD = {
    "400 px: waterfall, error columns, tables": ("e2e/operation/test_dashboard.py::test_every_page_fits_its_window",),
    "without a key": (
        "e2e/operation/test_access.py::test_a_key_is_entered_on_the_dashboard",
        "e2e/operation/test_first_key.py::test_the_link_of_the_dashboard_lets_its_owner_in_and_forgets_the_key",
    ),
    "unknown pages, search, order": (
        "e2e/operation/test_dashboard.py::test_functions_are_searched_and_pages_that_are_not_there_say_so",
    ),
    "read only": (
        "e2e/operation/test_dashboard.py::test_a_function_is_tried_by_a_form_made_from_its_types",
        "e2e/operation/test_dashboard.py::test_scale_and_rollback_change_the_function",
        "e2e/operation/test_dashboard_errands.py::test_a_budget_is_set_changed_and_removed",
        "e2e/operation/test_dashboard_errands.py::test_a_secret_is_set_and_removed",
        "e2e/operation/test_dashboard_errands.py::test_a_key_is_made_rotated_and_revoked",
        "e2e/operation/test_dashboard_errands.py::test_an_async_call_is_cancelled_and_a_dead_letter_runs_again",
    ),
    "a suggested command that fails": (
        "e2e/operation/test_dashboard.py::test_the_command_that_is_suggested_works_as_it_is",
    ),
    "no time range and no history": (
        "e2e/operation/test_dashboard_errands.py::test_a_bar_of_the_history_leads_to_the_calls_and_events_of_its_time",
    ),
    "hundreds of functions": (
        "e2e/operation/test_dashboard.py::test_functions_are_sorted_by_the_chosen_column",
        "e2e/operation/test_dashboard_errands.py::test_a_long_list_is_shown_in_pages",
    ),
    "alerts": ("docs/test_monitoring.py::test_every_metric_that_is_asked_for_is_exposed",),
}

ALL = {
    f"{table}: {what}": tests
    for table, found in (("stumble", STUMBLES), ("message", MESSAGES), ("dashboard", DASHBOARD))
    for what, tests in found.items()
}


@pytest.mark.parametrize("what", HANDLERS)
def test_each_handler_is_a_block_that_is_deployed_and_called(what: str) -> None:
    page, file = HANDLERS[what]
    assert page in NAMES
    assert file in {block.file for block in blocks(page, "python")}
    commands = [line for block in blocks(page, "sh") if not block.not_run for line in block.commands]
    assert any(line.startswith(f"fs deploy {file}") for line in commands)
    assert _has(COMMANDS)


def test_the_stranger_deploys_the_function_with_packages() -> None:
    page, file = OF_THE_STRANGER
    (block,) = (block for block in blocks(page, "python") if block.file == file)
    assert (ROOT / "tests/stranger/files" / file).read_text() == block.text.partition("\n")[2]


@pytest.mark.parametrize("what", ALL)
def test_each_stumble_has_tests_that_exist(what: str) -> None:
    assert [name for name in ALL[what] if not _has(name)] == []


def _has(test: str) -> bool:
    path, _, name = test.partition("::")
    return name in _tests_in(path)


@cache
def _tests_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
