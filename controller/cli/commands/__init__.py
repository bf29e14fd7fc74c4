"""One module a verb, each with a click command called `command`; loaded when the verb is typed."""

__all__: list[str] = []
