"""Trials of the object store and of Redis, before a system is started on them and when one is diagnosed."""

from __future__ import annotations

from fleetstart.runtime.contract.errors import FleetError, StartFailed

TRIAL_S = 5.0
"""Longest trial of one of them: a store on another continent answers within it."""


def redis_problem(url: str) -> FleetError | None:
    """Why the Redis cannot be used; None if it keeps what is written."""
    import asyncio  # late, as all here: who brings neither Redis nor store does not pay for the clients

    from ...state.redis_probe import try_redis

    try:
        asyncio.run(try_redis(url, timeout_s=TRIAL_S))
    except FleetError as error:
        return error
    return None


def redis_warnings(url: str) -> list[str]:
    """What is wrong with the settings of a Redis that works; none if it does not."""
    import asyncio

    from ...state.redis_client import REDIS_ERRORS
    from ...state.redis_probe import read_facts
    from ...state.redis_server.server_facts import settings_problems

    try:
        return settings_problems(asyncio.run(read_facts(url, timeout_s=TRIAL_S)))
    except REDIS_ERRORS:
        return []


def store_problem(location: str) -> FleetError | None:
    """Why the store cannot be used; None if it keeps what is written."""
    import asyncio

    from ...storage.factory import open_store
    from ...storage.probe import try_store

    async def tried() -> None:
        await try_store(open_store(location, attempts=1), timeout_s=TRIAL_S)

    try:
        asyncio.run(tried())
    except FleetError as error:
        return error
    except OSError as error:
        return StartFailed(f"its folder cannot be made: {error.strerror}", hint="name one that this user may write")
    except ValueError as error:  # a bucket's name that no bucket can have
        return StartFailed(f"store {location}: {error}", hint="a store is a folder, or s3://BUCKET/PREFIX")
    return None


def require_backends(*, redis: str, store: str) -> None:
    """Tries those that are given. Errors: StartFailed, with the cause and what to do."""
    for what, problem in (
        ("", redis_problem(redis) if redis else None),
        (f"store {store}: ", store_problem(store) if store else None),
    ):
        if problem is not None:
            raise StartFailed(f"{what}{problem.message}", hint=problem.hint)
