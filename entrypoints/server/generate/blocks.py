"""The blocks of an answer: runs of pieces of one kind, and the changes that streams report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from glowplug.core.protocols import Piece


@dataclass
class Block:
    """A run of reasoning or of content, or one tool call.

    Attributes:
        index: its place in the answer, from 0.
        kind: "reasoning", "content" or "tool_call".
        call_id, name: id and function of a tool call.
        parts: the text so far; of a tool call, its arguments as JSON.
        complete: another block follows, or the answer ended by itself.
    """

    index: int
    kind: str
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockChange(NamedTuple):
    """A change of an answer: a block opens, gets text, or closes.

    Attributes:
        action: the change.
        block: the block after the change.
        text: the new text, with "add".
    """

    action: Literal["open", "add", "close"]
    block: Block
    text: str = ""


class AnswerBlocks:
    """The blocks of one answer so far.

    Attributes:
        blocks: all blocks; only the last one may be open.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._call = -1

    def feed(self, pieces: Iterable[Piece]) -> list[BlockChange]:
        """Add pieces, and return the changes in order."""
        changes = []
        for piece in pieces:
            if self._begins(piece):
                changes += self._close(complete=True)
                changes.append(BlockChange("open", self._open(piece)))
            block = self.blocks[-1]
            if piece.text:
                block.parts.append(piece.text)
                changes.append(BlockChange("add", block, piece.text))
        return changes

    def end(self, complete: bool) -> list[BlockChange]:
        """End the answer, and return the changes. ``complete``: the answer ended by itself."""
        return self._close(complete)

    def _begins(self, piece: Piece) -> bool:
        """Return whether a piece begins a block."""
        if not self.blocks or self.blocks[-1].kind != piece.kind:
            return True
        return piece.data is not None and piece.data["index"] != self._call

    def _open(self, piece: Piece) -> Block:
        block = Block(len(self.blocks), piece.kind)
        if piece.data is not None:
            self._call = piece.data["index"]
            block.call_id = piece.data["id"]
            block.name = piece.data["name"]
        self.blocks.append(block)
        return block

    def _close(self, complete: bool) -> list[BlockChange]:
        """Close the open block, if there is one."""
        if not self.blocks:
            return []
        self.blocks[-1].complete = complete
        return [BlockChange("close", self.blocks[-1])]
