"""The tokenizer of a plan and the token ids that end a sequence.

The module is cheap to import, since ``glowplug check`` uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glowplug.core.errors import FactsError, PlanRefused, Refusal, RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet

if TYPE_CHECKING:
    from glowplug.core.text.tokenizer import Tokenizer


def open_tokenizer(plan: EnginePlan, plugins: PluginSet) -> Tokenizer | None:
    """Return the model's tokenizer; None with ``skip_tokenizer = true``.

    Raises:
        PlanRefused: no tokenizer was found, or the configured chat template fails.
    """
    from glowplug.core.text.find_tokenizer import find_tokenizer, tokenizer_path

    if plan.config.get("skip_tokenizer"):
        return None
    try:
        found = find_tokenizer(plan, plugins)
    except FactsError as error:
        raise PlanRefused(
            [Refusal(by="tokenizer", field="tokenizer", reason=str(error), fix=error.fix)]
        ) from None
    except ValueError as error:
        raise PlanRefused(
            [
                Refusal(
                    by="tokenizer",
                    field="tokenizer",
                    reason=str(error),
                    fix="download the file again, or set tokenizer = FOLDER",
                )
            ]
        ) from None
    if found is None:
        raise PlanRefused(
            [
                Refusal(
                    by="tokenizer",
                    field="tokenizer",
                    reason=f"no tokenizer was found at {tokenizer_path(plan).name!r}",
                    fix="put tokenizer.json, tokenizer.model or tiktoken.model beside the weights, "
                    "set tokenizer = FOLDER, or "
                    "skip_tokenizer = true",
                )
            ]
        )
    # NOTE: the tokenizer may have more ids than the embedding (padding ids). A request with such an
    # id is refused.
    tokenizer = found
    if plan.chat_template:
        tokenizer.use_chat_template(plan.chat_template)
        _check_template(tokenizer)
    return tokenizer


def _check_template(tokenizer: Tokenizer) -> None:
    """Check that the chat template can render a message.

    A template may raise an error of its own to refuse the message. This passes the check.

    Raises:
        PlanRefused: rendering failed for another reason.
    """
    from glowplug.core.text.chat_template import TEMPLATE_FIX

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    except RequestError as error:
        if error.param != "messages":
            raise PlanRefused(
                [Refusal("tokenizer", "chat_template", str(error), TEMPLATE_FIX)]
            ) from None


def eos_ids(plan: EnginePlan, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the token ids that end a sequence.

    The ids come from the tokenizer, which includes those of generation_config.json. If the
    tokenizer has none, they come from config.json.

    Raises:
        PlanRefused: config.json has an invalid ``eos_token_id``.
    """
    if tokenizer is not None and tokenizer.eos_ids:
        return tuple(tokenizer.eos_ids)
    stated: Any = plan.facts.model.config.get("eos_token_id")
    if stated is None:
        return ()
    ends = stated if isinstance(stated, list) else [stated]
    if not all(type(token) is int and token >= 0 for token in ends):
        reason = f"config.json: eos_token_id is {stated!r}, expected a token id or a list of them"
        raise PlanRefused(
            [Refusal("tokenizer", "model", reason, "use the checkpoint's own config.json")]
        )
    return tuple(ends)
