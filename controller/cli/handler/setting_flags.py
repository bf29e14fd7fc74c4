"""Options of `fs deploy` and `fs dev` that are settings of a function: each stands in for one in the handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from fleetstart.runtime.contract.function.spec import Isolation

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


SETTING_FLAGS = (
    click.option("--name", help="Name of the function; default: the handler's own, in kebab-case."),
    click.option("--memory", metavar="SIZE", help="Limit on a worker's own memory, such as 512MiB."),
    click.option("--gpu", metavar="REQUEST", help="Devices of a worker: 1, H100:2, or a share such as 24GiB."),
    click.option("--concurrency", type=int, help="Calls that one worker serves at a time."),
    click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Longest time that a call may take."),
    click.option("--retries", type=int, help="How often a call is run again after its worker died under it."),
    click.option(
        "--queue-timeout",
        "queue_timeout_s",
        type=float,
        metavar="SECONDS",
        help="Longest time of it that a call may wait for a worker.",
    ),
    click.option("--rate", type=float, metavar="PER_SECOND", help="Calls a second; more get 429."),
    click.option("--burst", type=int, help="Calls that may arrive at once after a pause, with --rate."),
    click.option("--concurrent", type=int, help="Calls that may run at a time; more get 429."),
    click.option("--max-body", metavar="SIZE", help="Largest body of a call, such as 10MiB."),
    click.option(
        "--cors", multiple=True, metavar="ORIGIN", help="Origin whose pages may call it, or *; may be repeated."
    ),
    click.option("--min", "min_workers", type=int, help="Workers that run even without calls, and are billed."),
    click.option("--max", "max_workers", type=int, help="Largest number of workers."),
    click.option("--keep-alive", "keep_alive_s", type=float, metavar="SECONDS", help="How long an idle worker stays."),
    click.option(
        "--standby",
        "standby_s",
        type=float,
        metavar="SECONDS",
        help="How long a language model's idle worker then stands by, without weights.",
    ),
    click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Tag for usage and cost; may be repeated."),
    click.option(
        "--isolation",
        type=click.Choice(get_args(Isolation)),
        metavar="NAME",
        help="How its workers are confined: namespaces, gvisor or container.",
    ),
    click.option("--image", help='Image of its containers; needs isolation="container".'),
    click.option("--region", multiple=True, help="Region in which it may run, such as eu; may be repeated."),
    click.option(
        "--keep", type=click.Choice(["host"]), help="Keep one copy of its weights in the memory of some node."
    ),
    click.option("--calls", multiple=True, metavar="NAME", help="Function that it may call; may be repeated."),
    click.option("--project", help="Its project; default: that of the key, or `default`."),
    click.option("--env", multiple=True, metavar="KEY=VALUE", help="Environment of the worker; may be repeated."),
)


def setting_flags(function: Decorated) -> Decorated:
    """Decorator with the options that are settings: those of `flags_of`."""
    for option in reversed(SETTING_FLAGS):
        function = option(function)
    return function
