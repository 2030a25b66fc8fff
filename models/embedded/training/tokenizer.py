"""The embedded model's byte-level BPE tokenizer: training, its files, and conversations as token
ids.

Digits are split one by one, so every number is spelled the same way wherever it stands.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 2048
BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
CONTROL = (BOS, EOS, PAD, USER, ASSISTANT)
# Written by the model and read by output parsers, so not skipped when decoding.
VISIBLE = (
    "<think>", "</think>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
BOS_ID, EOS_ID, PAD_ID, USER_ID, ASSISTANT_ID, THINK_ID = range(6)
THINK_PREFIX = "<think>\n"

Turn = tuple[str, str]  # user text, assistant text


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train the BPE merges on `texts` and dress the tokenizer with its special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, special=True, normalized=False) for t in CONTROL]
    specials += [AddedToken(t, special=False, normalized=False) for t in VISIBLE]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]),
        ]
    )
    # NOTE: the trainer marks all of its special tokens as special, whatever the AddedToken says.
    settings = json.loads(tokenizer.to_str())
    for token in settings["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(settings))


def save(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) as published folders
    have them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": (Path(__file__).parent / "chat_template.jinja")
        .read_text(encoding="utf-8")
        .rstrip("\n"),
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint or data folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt_text(
    turns: Sequence[Turn], question: str, *, think: bool = False, system: str = ""
) -> str:
    """What the chat template renders before the assistant answers `question`."""
    past = "".join(f"{USER}{user}{ASSISTANT}{answer}{EOS}" for user, answer in turns)
    return f"{BOS}{system}{past}{USER}{question}{ASSISTANT}{THINK_PREFIX if think else ''}"


def answer_mask(ids: Sequence[int]) -> list[bool]:
    """Which ids the assistant itself writes: after its tag (and an opening think tag and newline),
    EOS included.
    """
    mask = []
    answering = False
    skip = 0
    for place, token in enumerate(ids):
        if token == THINK_ID and place and ids[place - 1] == ASSISTANT_ID:
            skip = 2
        mask.append(answering and skip == 0)
        skip = max(skip - 1, 0)
        if token in (ASSISTANT_ID, EOS_ID):
            answering = token == ASSISTANT_ID
    return mask
