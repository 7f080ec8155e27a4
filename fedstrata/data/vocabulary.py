"""How texts become whole numbers: the tokens that are known, in their order, and how many of a text are kept.

Without word pieces, a text is lower-cased and split into runs of letters and digits, with apostrophes inside, and into
single signs. With word pieces (tokens that begin with ``##``), it is split as by BERT's uncased tokeniser: "BERT:
Pre-training of Deep Bidirectional Transformers for Language Understanding" (Devlin et al., NAACL 2019).
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata import files
from fedstrata.data.formats.bounds import refuse_irregular
from fedstrata.data.formats.samples import damaged
from fedstrata.errors import FedStrataError, FedStrataWarning

PADDING, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
_FURTHER = "##"
"""With what a piece begins that is not the first of its word."""
_LONGEST_WORD = 100
"""A longer word is unknown, as to BERT's tokeniser."""
_LARGEST_FILE = 2**26
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*|[^\s\\]")
_IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a model knows, and how many of a text it takes; it goes with the model as its preprocessing.

    A token's number is its place. The first is ``[PAD]``, which fills up short texts; ``[UNK]`` stands for what is not
    known. If they are among the tokens, ``[CLS]`` begins each text and ``[SEP]`` ends it, also a text that is cut off.

    >>> vocabulary = Vocabulary.build(["the cat sat", "The cat's mat!", "the cat"], words=5, length=4)
    >>> vocabulary.tokens
    ('[PAD]', '[UNK]', 'the', 'cat', '!')
    >>> vocabulary.encode(["The cat ran", "the mat ! the mat"]).tolist()
    [[2, 3, 1, 0], [2, 1, 4, 2]]
    """

    tokens: tuple[str, ...]
    length: int
    path: Path | None = field(default=None, compare=False, repr=False)
    """The file from which it was read, if any; it is not known to fit the texts."""

    def __post_init__(self) -> None:
        if self.tokens[:1] != (PADDING,) or UNKNOWN not in self.tokens:
            raise FedStrataError(f"The first token of a vocabulary must be {PADDING}, and {UNKNOWN} must be another.")
        if len(self._places) != len(self.tokens):
            twice = next(token for token, count in Counter(self.tokens).items() if count > 1)
            raise FedStrataError(f"The token '{twice}' stands twice in the vocabulary; name each once.")
        spaced = next((token for token in self.tokens if len(token.split()) > 1), None)
        if spaced is not None:
            raise FedStrataError(
                f"The token '{spaced}' has a space inside, where texts are split, so that no text could have it; give "
                "one token a line and nothing beside it."
            )
        if self.length <= self._marks:
            raise FedStrataError(
                f"Texts of {self.length} tokens have no room for a word beside {START} and {END}; choose a length of "
                f"at least {self._marks + 1}."
            )

    @classmethod
    def build(cls, texts: Iterable[str], words: int, length: int, start: bool = False) -> Vocabulary:
        """Take the most frequent words of texts, of those with equal counts the first in alphabetical order.

        There are ``words`` tokens, ``[PAD]``, ``[UNK]`` and with ``start`` ``[CLS]`` included, or fewer if the texts
        have fewer.
        """
        marks = _marks(start)
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(split_words(text))
        frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls((*marks, *(word for word, _ in frequent[: max(words - len(marks), 0)])), length)

    @classmethod
    def read(cls, path: Path, length: int, start: bool = False) -> Vocabulary:
        """Read a file with one token a line, such as BERT's ``vocab.txt``; a mere list of words gets what it lacks."""
        if not path.exists():
            raise FedStrataError(f"There is no vocabulary '{path}'; give a file with one token a line.")
        refuse_irregular(path)
        if path.stat().st_size > _LARGEST_FILE:
            raise damaged(path, f"a vocabulary has at most {_LARGEST_FILE >> 20} MiB")
        with files.explained(path, "read"):
            content = path.read_bytes()
        try:
            lines = [line.removesuffix("\r") for line in content.decode("utf-8").removesuffix("\n").split("\n")]
        except UnicodeDecodeError:
            raise damaged(path, "it is no text in UTF-8") from None
        empty = next((number for number, line in enumerate(lines, start=1) if not line), None)
        if empty is not None:
            raise damaged(path, f"line {empty} holds no token")
        marks = () if PADDING in lines else _marks(start and START not in lines)
        try:
            return cls((*(mark for mark in marks if mark not in lines), *lines), length, path)
        except FedStrataError as error:
            raise FedStrataError(f"'{path}' is no vocabulary: {error}") from None

    def write(self, path: str | Path) -> None:
        """Write the tokens into a file, one a line, for sites that are to encode alike."""
        files.write_atomically(Path(path), "".join(f"{token}\n" for token in self.tokens))

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Turn texts into whole numbers ``[texts, length]``; what is longer is cut off, what is shorter filled up."""
        numbers = np.zeros((len(texts), self.length), dtype=np.int64)
        for row, text in zip(numbers, texts, strict=True):
            found = self.numbers(text)
            row[: len(found)] = found
        if self.path is not None:
            self._note_unknown(self.path, numbers)
        return torch.from_numpy(numbers)

    def _note_unknown(self, path: Path, numbers: np.ndarray) -> None:
        """Say so where a file knows less than a third of the tokens of texts ``[texts, length]``."""
        given = int(np.count_nonzero(numbers)) - self._marks * len(numbers)
        unknown = int(np.count_nonzero(numbers == self._places[UNKNOWN]))
        if 3 * unknown > 2 * given:
            warnings.warn(
                f"Of the {given:,} tokens of the texts, the vocabulary '{path}' does not know {unknown:,}, which all "
                f"become {UNKNOWN}. It needs tokens in lower case, of the texts' language, one a line.",
                FedStrataWarning,
                stacklevel=3,
            )

    def numbers(self, text: str) -> list[int]:
        """Turn one text into the numbers of its tokens, at most ``length``."""
        places, unknown = self._places, self._places[UNKNOWN]
        room = self.length - self._marks
        words = split_like_bert(text) if self.pieces else split_words(text)
        if self.pieces:
            found = list(islice((number for word in words for number in self._pieces_of(word)), room))
        else:
            found = [places.get(word, unknown) for word in islice(words, room)]
        begin, end = ([places[mark]] if mark in places else [] for mark in (START, END))
        return [*begin, *found, *end]

    @cached_property
    def pieces(self) -> bool:
        """Whether words are made of pieces."""
        return any(token.startswith(_FURTHER) and token != _FURTHER for token in self.tokens)

    def _pieces_of(self, word: str) -> tuple[int, ...]:
        """Find the longest known beginning of a word, then of what is left; all or nothing of it is known."""
        if word in self._known_words:
            return self._known_words[word]
        found, begin = [], 0
        while begin < len(word) <= _LONGEST_WORD:
            prefix = _FURTHER if begin else ""
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if prefix + word[begin:end] in self._places), None)
            if end is None:
                break
            found.append(self._places[prefix + word[begin:end]])
            begin = end
        pieces = tuple(found) if begin == len(word) else (self._places[UNKNOWN],)
        self._known_words[word] = pieces
        return pieces

    @cached_property
    def _known_words(self) -> dict[str, tuple[int, ...]]:
        return {}

    @cached_property
    def _places(self) -> dict[str, int]:
        return {token: place for place, token in enumerate(self.tokens)}

    @property
    def _marks(self) -> int:
        return (START in self._places) + (END in self._places)

    def to_mapping(self) -> dict[str, Any]:
        """Write it as plain data, for JSON."""
        splitting = "pieces" if self.pieces else "words"
        return {"splitting": splitting, "lower_case": True, "length": self.length, "tokens": list(self.tokens)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Vocabulary:
        """Read what :meth:`to_mapping` has written."""
        try:
            found = cls(tuple(map(str, values["tokens"])), int(values["length"]))
            same = found.to_mapping() == dict(values)
        except (KeyError, TypeError, ValueError) as error:
            raise FedStrataError(f"This does not describe a vocabulary: {error!r} is the trouble.") from None
        if not same:
            raise FedStrataError("This vocabulary splits texts in a way that this version does not know.")
        return found


def _marks(start: bool) -> tuple[str, ...]:
    return (PADDING, UNKNOWN, START) if start else (PADDING, UNKNOWN)


def split_words(text: str) -> Iterator[str]:
    r"""Lower-case a text and split it into words and signs; a backslash, which stands for a new line, is none.

    >>> list(split_words("Don't pay  $9.50\\for it_"))
    ["don't", 'pay', '$', '9', '.', '50', 'for', 'it', '_']
    """
    return (found.group() for found in _WORD.finditer(text.lower()))


def split_like_bert(text: str) -> Iterator[str]:
    """Split a text as BERT's uncased tokeniser does before it looks for pieces.

    Letters lose their accents, and each sign of punctuation and each Chinese character is a word.

    >>> list(split_like_bert("Café: don't!"))
    ['cafe', ':', 'don', "'", 't', '!']
    """
    for word in text.split():
        if word.isascii() and word.isalnum():
            yield word.lower()
            continue
        letters: list[str] = []
        for letter in unicodedata.normalize("NFD", word.lower()):
            kind = unicodedata.category(letter)
            if kind == "Mn" or kind.startswith("C") or letter == "\ufffd":
                continue
            if not _stands_alone(letter, kind):
                letters.append(letter)
                continue
            if letters:
                yield "".join(letters)
            letters = []
            yield letter
        if letters:
            yield "".join(letters)


def _stands_alone(letter: str, kind: str) -> bool:
    sign = letter.isascii() and not letter.isalnum()
    return sign or kind.startswith("P") or any(low <= ord(letter) <= high for low, high in _IDEOGRAPHS)
