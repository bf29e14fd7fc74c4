"""Tool formats: how models of a family write calls, recognised by their chat template.

A template that renders no tools gets a system message with the tools in the format of Hermes, which many small models
have seen in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...text.chat_template import ChatTemplate
from ...text.tokenizer import Vocabulary
from .named_call import ARGUMENTS_MARK, ID_MARK
from .parameter_call import FUNCTION, PARAMETER


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format in which a family of models writes calls: `begin`, one or several of them, `end`."""

    name: str
    begin: str
    end: str = ""
    kind: Literal["object", "named", "parameters"] = "object"
    """A call is an object with a name and arguments, or a name before its arguments (`named_call`), or tags around
    parameters (`parameter_call`)."""
    call_ids: bool = False
    """True if a named call has an id before its arguments."""
    arguments: str = "arguments"
    """Key of the arguments."""
    opens: str = ""
    """Text between `begin` and the first object."""
    between: str = ", "
    closes: str = ""
    """Text between the last object and `end`."""
    one_per_block: bool = False
    """True if each call has its own `begin` and `end`."""
    bare: bool = False
    """True if a call may begin without `begin`, as the answer's first character."""
    short_ids: bool = False
    """True if the template takes only ids of nine letters and digits."""
    own_prompt: bool = False
    """True if the template renders no tools, so that a system message declares them."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own."""
        inner = ((ID_MARK,) if self.call_ids else ()) + ((ARGUMENTS_MARK,) if self.kind == "named" else ())
        return tuple(mark for mark in (self.begin, *inner, self.end) if mark)


HERMES = ToolFormat(
    name="Hermes", begin="<tool_call>", end="</tool_call>", opens="\n", closes="\n", between="\n", one_per_block=True
)
LLAMA3 = ToolFormat(name="Llama 3", begin="<|python_tag|>", arguments="parameters", between="; ", bare=True)
MISTRAL = ToolFormat(name="Mistral", begin="[TOOL_CALLS]", opens="[", closes="]", short_ids=True)
MISTRAL_NAMED = ToolFormat(
    name="Mistral, names first", begin="[TOOL_CALLS]", kind="named", between="", one_per_block=True, short_ids=True
)
MISTRAL_NAMED_IDS = ToolFormat(
    name="Mistral, names and ids first", begin="[TOOL_CALLS]", kind="named", call_ids=True, between="",
    one_per_block=True, short_ids=True,
)  # fmt: skip
QWEN_CODER = ToolFormat(
    name="Qwen for code", begin=HERMES.begin, end=HERMES.end, kind="parameters", opens="\n", closes="\n",
    between="\n", one_per_block=True,
)  # fmt: skip
PROMPTED = ToolFormat(
    name="Hermes, declared by a system message", begin=HERMES.begin, end=HERMES.end, opens="\n", closes="\n",
    between="\n", one_per_block=True, own_prompt=True,
)  # fmt: skip


def format_of(template: ChatTemplate) -> ToolFormat | None:
    """Format of a template's tools; None if it renders tools in a format that is not known here."""
    if not template.takes_tools:
        return PROMPTED
    source = template.tool_source
    if "[TOOL_CALLS]" in source:
        if ARGUMENTS_MARK in source:
            return MISTRAL_NAMED_IDS if ID_MARK in source else MISTRAL_NAMED
        return MISTRAL
    if "<|python_tag|>" in source:
        return LLAMA3
    if "<tool_call>" in source and FUNCTION in source:
        return QWEN_CODER if PARAMETER in source else None
    return HERMES if "<tool_call>" in source and "<arg_key>" not in source else None


def mark_tokens(form: ToolFormat, vocabulary: Vocabulary) -> dict[str, int]:
    """The format's marks that are one token."""
    encoded = {mark: vocabulary.encode(mark, add_special_tokens=False) for mark in form.marks}
    return {mark: tokens[0] for mark, tokens in encoded.items() if len(tokens) == 1}


def shown_tokens(marks: Mapping[str, int], vocabulary: Vocabulary) -> dict[int, str]:
    """Special tokens among the marks: texts are decoded without them, and calls are read from the text."""
    return {token: mark for mark, token in marks.items() if not vocabulary.decode([token])}
