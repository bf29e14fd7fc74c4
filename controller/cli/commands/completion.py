"""`fs completion`: prints a shell's completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .. import output
from ..root import root, verb

VARIABLE = "_FS_COMPLETE"
"""Environment variable through which a shell asks click for completions."""


@click.command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@verb(server=False)
def command(*, shell: str, as_json: bool) -> None:
    """Print a script that completes verbs, options, files and names of functions in your shell.

    Names are asked of the server that FS_URL, --url or FS_HOME name, which has a second to answer.

    \b
    eval "$(fs completion bash)"                 # in ~/.bashrc
    eval "$(fs completion zsh)"                  # in ~/.zshrc
    fs completion fish > ~/.config/fish/completions/fs.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    script = found(root, {}, "fs", VARIABLE).source()
    if as_json:
        output.json_data({"shell": shell, "script": script})
    else:
        output.data(script)
