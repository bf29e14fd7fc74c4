"""Verbs: one module each, with a click command called `command`; imported only when the verb is used."""

__all__: list[str] = []
