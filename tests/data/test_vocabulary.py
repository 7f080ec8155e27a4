"""Texts become whole numbers, checked by hand, and as BERT's own tokeniser would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.data import Vocabulary
from fedstrata.data.vocabulary import split_like_bert, split_words
from fedstrata.errors import FedStrataError, FedStrataWarning

MARKS = ("[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]")
BERT = (*MARKS, "un", "##aff", "##able", "play", "##ing", "a", "!", "caf", "##e")


def test_words_are_lower_case_with_apostrophes_and_signs_stand_alone() -> None:
    text = "It's Sony's $250m-deal; (see AOL_UK)…  'quoted'\tÜber\\Oil 😀"
    expected = ["it's", "sony's", "$", "250m", "-", "deal", ";", "(", "see", "aol", "_", "uk", ")", "…"]
    assert list(split_words(text)) == [*expected, "'", "quoted", "'", "über", "oil", "😀"]
    assert list(split_words("  \\ \n")) == []


def test_the_most_frequent_words_are_kept_equal_ones_in_alphabetical_order() -> None:
    texts = ["b a c", "c B", "c d, d", "zebra"]  # c 3, b 2, d 2, then "," a and zebra once
    whole = Vocabulary.build(texts, words=100, length=3)
    assert whole.tokens == ("[PAD]", "[UNK]", "c", "b", "d", ",", "a", "zebra")
    assert Vocabulary.build(reversed(texts), words=5, length=3).tokens == whole.tokens[:5]
    started = Vocabulary.build(texts, words=5, length=3, start=True)
    assert started.tokens == ("[PAD]", "[UNK]", "[CLS]", "c", "b")
    assert whole.encode(["d a", "nothing C b a", ""]).tolist() == [[4, 6, 0], [1, 2, 3], [0, 0, 0]]
    assert started.encode(["c d b", ""]).tolist() == [[2, 3, 1], [2, 0, 0]]


def test_pieces_are_the_longest_that_are_known_and_marks_stand_around_them() -> None:
    vocabulary = Vocabulary(BERT, length=8)
    expected = [
        [3, 5, 6, 7, 11, 4, 0, 0],  # un ##aff ##able !
        [3, 8, 9, 10, 4, 0, 0, 0],  # play ##ing a
        [3, 2, 12, 13, 4, 0, 0, 0],  # nothing of a word is known where its end is not; accents are taken off
        [3, 10, 10, 10, 10, 10, 10, 4],  # cut off, and ended all the same
        [3, 2, 4, 0, 0, 0, 0, 0],  # longer than a hundred letters
    ]
    texts = ["Unaffable!", "playing A", "playful Café", "a " * 20, "a" * 101]
    assert vocabulary.encode(texts).tolist() == expected
    assert torch.equal(vocabulary.encode(texts), vocabulary.encode(texts))
    words = ["don", "'", "t", "@", "home", "5€", "中", "文", "x"]
    assert list(split_like_bert("Don't @home 5€ 中文x\u200b\ufffd")) == words


@settings(max_examples=25)
@given(st.lists(st.text(max_size=30), max_size=5), st.integers(1, 6), st.integers(2, 12))
def test_any_text_has_numbers_below_the_size(texts: list[str], length: int, words: int) -> None:
    for vocabulary in (Vocabulary.build(texts, words, length), Vocabulary(BERT, length + 2)):
        numbers = vocabulary.encode(texts)
        assert numbers.shape == (len(texts), vocabulary.length)
        assert numbers.dtype == torch.int64
        assert bool(((numbers >= 0) & (numbers < len(vocabulary.tokens))).all())
        assert Vocabulary.from_mapping(vocabulary.to_mapping()) == vocabulary


def test_a_vocabulary_is_written_one_token_a_line_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.txt"
    for vocabulary in (Vocabulary(BERT, 8), Vocabulary.build(["é b \u2028 '"], 9, 4, start=True)):
        vocabulary.write(path)
        assert Vocabulary.read(path, vocabulary.length) == vocabulary
    path.write_text("good\r\nbad\r\n")
    assert Vocabulary.read(path, 4).tokens == ("[PAD]", "[UNK]", "good", "bad")
    assert Vocabulary.read(path, 4, start=True).tokens == ("[PAD]", "[UNK]", "[CLS]", "good", "bad")


def test_a_file_whose_tokens_the_texts_do_not_have_is_named(tmp_path: Path) -> None:
    """Tokens are in lower case: of "the title, some" a cased list knows the comma alone."""
    path, texts = tmp_path / "cased.txt", ["The Title, some"]
    path.write_text("The\nSome\nTitle\n,\n[SEP]\n")
    with pytest.warns(FedStrataWarning, match=r"Of the 4 tokens .*cased\.txt' does not know 3"):
        assert Vocabulary.read(path, 6).encode(texts).tolist() == [[1, 1, 5, 1, 6, 0]]
    path.write_text("the\nsome\n[SEP]\n")
    assert Vocabulary.read(path, 6).encode(texts).tolist() == [[2, 1, 1, 3, 4, 0]], "half is known, which is no matter"
    assert Vocabulary.build(["other words"], 4, 4).encode(texts).tolist() == [[1, 1, 1, 1]], "as is what was not read"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe", "UTF-8"),
        (b"a\n\nb\n", "line 2 holds no token"),
        (b"a\nb\na\n", "'a' stands twice"),
        (b"a\n[PAD]\n[UNK]\n", r"first token of a vocabulary must be \[PAD\]"),
        (b"[PAD]\na\n", r"\[UNK\] must be"),
        (b"the 5\na 4\n", "token 'the 5' has a space inside, .* one token a line"),
        (b"the\t5\n", "has a space inside"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n", "no room for a word"),
    ],
)
def test_a_damaged_vocabulary_gets_a_sentence(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(FedStrataError, match=reason):
        Vocabulary.read(path, 2)
    with pytest.raises(FedStrataError, match="no vocabulary"):
        Vocabulary.read(tmp_path / "other.txt", 2)
    with pytest.raises(FedStrataError, match="no regular file"):
        Vocabulary.read(tmp_path, 2)


def test_a_card_of_another_version_is_not_guessed_at() -> None:
    written = Vocabulary(BERT, 8).to_mapping()
    for wrong in ({**written, "splitting": "letters"}, {"tokens": ["[PAD]"]}, {**written, "length": "x"}):
        with pytest.raises(FedStrataError, match=r"vocabulary"):
            Vocabulary.from_mapping(wrong)
