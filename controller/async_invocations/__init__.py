"""Async invocations: calls that outlive their connection, their results, webhooks, schedules, and idempotency keys.

`middleware` stands before the gateway and takes calls with the headers of one of these; `runner` executes accepted
ones through the same gateway. `store.lifecycle` decides the state transitions, `store.invocations` keeps the state in
Redis, and `store.payloads` keeps requests and responses in the object store.
"""
