"""The daemon as a process, with a real Redis, store, fork server and workers."""

from __future__ import annotations

from tests.prefetcher.nodes import HELLO, Node, Store, call, spec_of


def test_an_ordered_worker_gets_ready_and_answers_those_who_know_its_token(node: Node, store: Store) -> None:
    worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO})))

    status = node.wait_for(worker, "ready")

    assert call(status, b'{"name": "you"}') == (200, b'"hello you"')
    assert call(status, token="guessed")[0] in (401, 403)
    assert status.start == "warm"
    assert status.timeline.phases[0].name == "start"
