"""Words of instructions as numbers, for policies without a language model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.files import write_atomically

WORD = re.compile(r"[a-z0-9]+")
PADDING, UNKNOWN = 0, 1


class Vocabulary:
    """A list of words; a word's number is its index plus 2, after padding 0 and unknown 1."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.unknown: Counter[str] = Counter()
        """Occurrences of words that are not in the list."""
        self._number = {word: number for number, word in enumerate(self.words, start=UNKNOWN + 1)}

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Self:
        """All words of some texts, in alphabetical order."""
        return cls(sorted({word for text in texts for word in WORD.findall(text.lower())}))

    def __len__(self) -> int:
        """Number of words, with padding and unknown."""
        return len(self.words) + UNKNOWN + 1

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """(N, length) int64 words of N texts, padded on the right with 0; a text without words is one unknown word."""
        numbers = torch.full((len(texts), length), PADDING)
        for row, text in enumerate(texts):
            words = WORD.findall(text.lower())
            if len(words) > length:
                raise UserError(f"the instruction {text!r} has {len(words)} words; at most {length} are possible")
            if not words:  # attention needs something to attend to
                numbers[row, 0] = UNKNOWN
                continue
            self.unknown.update(self.unknown_words(text))
            numbers[row, : len(words)] = torch.tensor([self._number.get(word, UNKNOWN) for word in words])
        return numbers

    def unknown_words(self, text: str) -> list[str]:
        """Words of a text that are not in the list, in order, with repetitions."""
        return [word for word in WORD.findall(text.lower()) if word not in self._number]

    def save(self, path: Path | str) -> None:
        """Write the words as JSON."""
        write_atomically(Path(path), json.dumps(self.words) + "\n")

    def check_same(self, path: Path | str) -> None:
        """Check that a saved vocabulary has the same words; raises UserError."""
        if Vocabulary.load(path).words != self.words:
            raise UserError(f"{path} has other words than this policy's vocabulary")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote; raises UserError where there is no such file."""
        if not Path(path).is_file():
            raise UserError(f"there is no vocabulary {path}")
        try:
            words = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError(f"{path} must hold a list of words")
        return cls(words)
