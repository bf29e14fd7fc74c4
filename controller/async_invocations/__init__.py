"""Calls that outlive their connection: async invocations, their results, webhooks, schedules, and idempotency keys.

`layer` stands in front of the gateway and takes the calls that ask for one of these; `runner` carries accepted ones
out, through the same gateway as any other call. What becomes of an invocation is decided in `lifecycle`, kept in Redis
by `book`, and its bytes in the object store by `vault`.
"""
