"""Chat templates: Jinja templates of a model folder, rendered as untrusted code.

The sandbox has no loader, refuses unsafe attributes and changes to its inputs (CVE-2026-5760,
CVE-2024-34359: templates that reached Python's object graph), and stops at a deadline and at a
size limit. Every failure is a RequestError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import local
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from glowplug.core.errors import FactsError, RequestError

RENDER_SECONDS = 5.0  #: longest time of rendering
RENDER_CHARACTERS = 16 << 20  #: most characters of a rendered text or an intermediate result
MAX_TEMPLATE = 1 << 20  #: most bytes of a template's file
#: largest integer argument of a function; larger ones only serve to exhaust memory
LARGEST_ARGUMENT = 1 << 20


class RaisedByTemplate(TemplateError):
    """The error when a template itself refuses the conversation (``raise_exception``)."""


class TooMuch(TemplateError):
    """The error of a template that runs too long or produces too much text."""


class Generation(Extension):
    """The tag ``{% generation %}``, rendered as its contents.

    Training uses it to mark the assistant's tokens.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Guard(NodeTransformer):
    """A syntax-tree transformer that adds checks of the deadline (loops) and size (``~``)."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.Or(_call("tick", [], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node.lineno)


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    """Return the syntax tree of a call of the sandbox's method named ``method``."""
    return nodes.Call(
        nodes.EnvironmentAttribute(method, lineno=line), arguments, [], None, None, lineno=line
    )


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with size limits and a deadline, checked in every loop iteration and call."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, Generation],
            cache_size=0,
        )
        self.filters["tojson"] = to_json
        self.globals = {
            **self.globals,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }
        self.globals.pop("lipsum", None)
        self._rendering = local()

    def start(self, deadline: float) -> None:
        """Start rendering in this thread; ``deadline`` is a time of ``time.monotonic``."""
        self._rendering.deadline = deadline

    def tick(self) -> str:
        """Check the deadline and return "", so that the call can stand in a template expression.

        Raises:
            TooMuch: the deadline has passed.
        """
        if time.monotonic() > self._rendering.deadline:
            raise TooMuch(f"rendering took longer than {RENDER_SECONDS} s")
        return ""

    def concatenate(self, *parts: Any) -> str:
        """Concatenate values (the operator ``~``).

        Raises:
            TooMuch: the result is too large.
        """
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > RENDER_CHARACTERS:
            raise TooMuch("a concatenation is too large")
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        Guard().visit(tree)
        tree.set_environment(self)
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        if any(
            isinstance(value, int) and abs(value) > LARGEST_ARGUMENT
            for value in (*args, *kwargs.values())
        ):
            raise TooMuch("a number passed to a function is too large")
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > RENDER_CHARACTERS:
            raise TooMuch(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Return the rough size of an operation's result, in characters, items or bits."""
    sized = [len(value) if isinstance(value, str | list | tuple) else 0 for value in (left, right)]
    numbers = [abs(value) if isinstance(value, int) else 0 for value in (left, right)]
    if operator == "+":
        return sum(sized)
    if operator == "*":
        return max(sized[0] * numbers[1], sized[1] * numbers[0])
    return numbers[0].bit_length() * numbers[1]


def raise_exception(message: str) -> None:
    raise RaisedByTemplate(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return ``value`` as JSON like transformers: no HTML escapes, non-ASCII characters kept."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled template. Several threads may render it at once.

    Raises:
        RequestError: the source cannot be compiled.
    """

    def __init__(self, source: str) -> None:
        self._sandbox = Sandbox()
        self._source = source
        try:
            self._template = self._sandbox.from_string(source)
        except (TemplateError, RecursionError, ValueError) as error:
            raise _failed(error) from None

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads from its caller."""
        return frozenset(meta.find_undeclared_variables(self._sandbox.parse(self._source)))

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template with ``variables``.

        Raises:
            RequestError: the template raises, runs too long or produces too much text (code
                ``template_error``).
        """
        self._sandbox.start(time.monotonic() + RENDER_SECONDS)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(**variables):
                size += len(piece)
                if size > RENDER_CHARACTERS:
                    raise TooMuch(
                        f"the rendered prompt is longer than {RENDER_CHARACTERS} characters"
                    )
                pieces.append(piece)
        # NOTE: a template is a program of the model's author: any exception in it is an error of
        # the request, not of the server.
        except Exception as error:
            raise _failed(error) from None
        return "".join(pieces)


def _failed(error: Exception) -> RequestError:
    if isinstance(error, RaisedByTemplate):
        return RequestError(
            f"the chat template refused the messages: {error}",
            code="template_error",
            param="messages",
            confidential=True,
        )
    text = str(error)[:300] or type(error).__name__
    return RequestError(
        f"the chat template failed: {type(error).__name__}: {text}",
        code="template_error",
        confidential=True,
    )


# ---- the operator's own template -----------------------------------------------------------------

TEMPLATE_FIX = (
    "give a Jinja file, or the template itself; leave chat_template out for the model's own"
)


def is_inline(given: str) -> bool:
    """Return True if ``given`` is a template's source, False if it is a path."""
    return "{" in given


def read_template(given: str) -> str:
    """Return the source of the operator's template.

    Args:
        given: a path, or the source itself. In a source, backslash-n stands for a line break, as in
            other engines.

    Raises:
        FactsError: the file cannot be read, or the text is no chat template: it does not compile,
            or does not read the messages. The error has the fix.
    """
    if is_inline(given):
        name = "the inline template"
        source = given.replace("\\n", "\n")
    else:
        name = Path(given).name
        source = _read_file(Path(given).expanduser())
    try:
        sandbox = Sandbox()
        sandbox.from_string(source)
        read = meta.find_undeclared_variables(sandbox.parse(source))
    except TemplateSyntaxError as error:
        raise FactsError(
            f"{name} is no chat template: line {error.lineno}: {error.message}", TEMPLATE_FIX
        ) from None
    except (TemplateError, RecursionError, ValueError) as error:
        raise FactsError(f"{name} is no chat template: {str(error)[:200]}", TEMPLATE_FIX) from None
    if "messages" not in read:
        raise FactsError(f"{name} is no chat template: it does not read 'messages'", TEMPLATE_FIX)
    return source


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE + 1)
        if len(data) <= MAX_TEMPLATE:
            return data.decode("utf-8")
        reason = f"it is larger than {MAX_TEMPLATE >> 20} MiB"
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except ValueError as error:  # NOTE: the name contains a null byte
        reason = str(error)
    raise FactsError(
        f"the chat template {path.name[:128]!r} could not be read: {reason}", TEMPLATE_FIX
    )


def check_arguments(
    arguments: Mapping[str, Any], permitted: frozenset[str], both_ends: bool
) -> None:
    """Check the arguments of a conversation.

    Args:
        arguments: further variables for the template.
        permitted: their permitted names.
        both_ends: both ``add_generation_prompt`` and ``continue_final_message`` are set.

    Raises:
        RequestError: an argument is not permitted, or both are set.
    """
    unknown = sorted(arguments.keys() - permitted)
    if unknown:
        raise RequestError(
            f"{unknown[0][:64]!r} is not a supported argument of chat templates; supported are "
            + ", ".join(sorted(permitted)),
            param="chat_template_kwargs",
        )
    if both_ends:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )


def cut_after_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Cut ``text`` after the last message's content, so that the model continues this message.

    Raises:
        RequestError: the last message has no text, or ``text`` does not contain it.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError(
            "continue_final_message requires a last message with text", param="messages"
        )
    for ending in (content, content.lstrip(), content.rstrip(), content.strip()):
        at = text.rfind(ending)
        if at >= 0:
            return text[: at + len(ending)]
    raise RequestError(
        "continue_final_message: the chat template does not render the last message verbatim",
        param="messages",
    )
