"""Named sets of texts, on small files in their true formats written here, and on real files where they are."""

from __future__ import annotations

import csv
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedstrata.data import Dataset, datasets, partitions
from fedstrata.data.datasets.sentiment140 import FILE
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.testing import check_dataset

REAL = Path(os.environ.get("FEDSTRATA_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")
real_files = pytest.mark.skipif(not (REAL / "ag_news").is_dir(), reason="the real files are not on this machine")

AG = {
    "train": [(3, "Oil rises", "Oil, at $46\\a barrel"), (4, 'He said ""no""', "Chips"), (2, "Cup", "Oil cup")],
    "test": [(1, "Troops", "Oil")],
}
TWEETS = [
    *((0, "anna", f"sad day {number}") for number in range(5)),
    *((4, "anna", f"good day {number}") for number in range(5)),
    *((4, "bob", "café, \xa3" if number else 'so ""good"", yes') for number in range(4)),
    (0, "cid", "late"),
    (4, "dora", "good"),
    (4, "dora", "good"),
]


@pytest.fixture(autouse=True)
def _no_other_roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


def load(text: str, root: Path) -> Dataset:
    return datasets.make(text).load(root)


def write_news(folder: Path, parts: dict[str, list[tuple[int, str, str]]] = AG) -> None:
    """Write rows as published: all values in double quotes, which are doubled inside, no line of names."""
    folder.mkdir(parents=True)
    for part, rows in parts.items():
        lines = [",".join(f'"{value}"' for value in row) for row in rows]
        (folder / f"{part}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_reviews(folder: Path, labels: list[int] | None = None) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 8), ("test", 4)):
        columns = {
            "text": [f"a {'good' if row % 2 else 'bad'} thing , number {row}" for row in range(count)],
            "label": (labels or [0, 1, 0, 1, 0, 1, 0, 1])[:count],
            "domain": [("books", "books", "dvd", "dvd")[row % 4] for row in range(count)],
        }
        pq.write_table(pa.table(columns), folder / f"{part}-00000-of-00001.parquet")


def write_tweets(folder: Path, tweets: list[tuple[int, str, str]] = TWEETS) -> None:
    folder.mkdir(parents=True)
    rows = [
        f'"{target}","{number}","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","{user}","{text}"'
        for number, (target, user, text) in enumerate(tweets)
    ]
    (folder / FILE).write_bytes("\n".join(rows).encode("latin-1"))


@pytest.mark.parametrize("place", ["ag_news", "ag_news/ag_news_csv", "."])
def test_ag_news_as_published(place: str, tmp_path: Path) -> None:
    write_news(tmp_path / "data" / place)
    with (
        pytest.warns(FedStrataWarning, match=r"csv' is taken for a file of 'ag_news'")
        if place == "."
        else nullcontext()
    ):
        data = load("ag_news(words=6, length=8)", tmp_path / "data")
    assert data.vocabulary is not None
    # oil 3, cup 2, then the signs " " $ , once more often than letters: " stands twice
    assert data.vocabulary.tokens == ("[PAD]", "[UNK]", "oil", '"', "cup", "$")
    assert data.inputs.tolist() == [
        [2, 1, 2, 1, 1, 5, 1, 1],  # oil rises oil , at $ 46 a, and barrel is cut off
        [1, 1, 3, 1, 3, 1, 0, 0],  # he said " no " chips
        [4, 2, 4, 0, 0, 0, 0, 0],
        [1, 2, 0, 0, 0, 0, 0, 0],
    ]
    assert data.labels.tolist() == [2, 3, 1, 0]
    assert data.class_names == ("World", "Sports", "Business", "Sci/Tech")
    assert (data.train.tolist(), data.test.tolist()) == ([0, 1, 2], [3])
    assert data.mean is None
    assert data.trial is not None
    assert int(data.trial.max()) == 5
    check_dataset(data)


def test_ag_news_from_parquet_is_the_same_and_the_test_part_alone_is_divided(tmp_path: Path) -> None:
    write_news(tmp_path / "csv" / "ag_news")
    folder = tmp_path / "parquet" / "ag_news" / "data"
    folder.mkdir(parents=True)
    for part, rows in AG.items():
        texts = [f"{title} {text}".replace('""', '"') for _, title, text in rows]
        table = pa.table({"text": texts, "label": [number - 1 for number, _, _ in rows]})
        pq.write_table(table, folder / f"{part}-00000-of-00001.parquet")
    one, other = (load("ag_news(length=9)", tmp_path / root) for root in ("csv", "parquet"))
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.labels, other.labels)
    write_news(tmp_path / "test" / "ag_news", {"test": [(1 + row % 2, "a", f"text {row}") for row in range(8)]})
    divided = load("ag_news(part=test)", tmp_path / "test")
    assert (len(divided.train), divided.test.tolist()) == (6, [4, 5])
    with pytest.raises(FedStrataError, match=r"train\.csv and test\.csv .*ag_news\(part=test\) divides it"):
        load("ag_news", tmp_path / "test")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_in_no_folder_of_their_own_are_of_another_set_where_classes_are_missing(
    kind: str, tmp_path: Path
) -> None:
    """Those of AG News and of Sogou News are called alike, and have four classes and five."""
    if kind == "csv":
        write_news(tmp_path / "data")
    else:
        (tmp_path / "data").mkdir()
        for part, rows in AG.items():
            columns = {"text": [text for *_, text in rows], "label": [number - 1 for number, *_ in rows]}
            pq.write_table(pa.table(columns), tmp_path / "data" / f"{part}-00000-of-00001.parquet")
    sentence = r"seems to be of another dataset than 'sogou_news', which has 5 classes: .* 'technology'\. Put the files"
    with pytest.raises(FedStrataError, match=sentence):
        load("sogou_news", tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "sogou_news")
    assert len(load("sogou_news", tmp_path / "sogou_news").inputs) == 4


def test_sogou_news_as_published(tmp_path: Path) -> None:
    write_news(tmp_path / "sogou_news", {"train": [(5, "ti2 yu4", "shou3\\nji1")], "test": [(1, "qiu2", "shou3 ji1")]})
    data = load("sogou_news(length=5)", tmp_path)
    assert data.vocabulary is not None
    assert data.vocabulary.tokens[2:] == ("ji1", "shou3", "ti2", "yu4")
    assert data.inputs.tolist() == [[4, 5, 3, 2, 0], [1, 3, 2, 0, 0]]
    assert [data.class_names[label] for label in data.labels] == ["technology", "sports"]


def test_sogou_news_of_the_hub_has_title_and_content_apart(tmp_path: Path) -> None:
    parts = {"train": [(5, "ti2 yu4", "shou3\\nji1")], "test": [(1, "qiu2", "shou3 ji1")]}
    write_news(tmp_path / "csv" / "sogou_news", parts)
    folder = tmp_path / "parquet" / "sogou_news"
    folder.mkdir(parents=True)
    for part, rows in parts.items():
        numbers, titles, texts = zip(*rows, strict=True)
        columns = {"title": titles, "content": texts, "label": [number - 1 for number in numbers]}
        pq.write_table(pa.table(columns), folder / f"{part}-00000-of-00001.parquet")
    one, other = (load("sogou_news(length=5)", tmp_path / root) for root in ("csv", "parquet"))
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.labels, other.labels)
    pq.write_table(pa.table({"title": ["a"], "label": [0]}), folder / "train-00000-of-00001.parquet")
    with pytest.raises(FedStrataError, match="the columns title, label; 'text', or else title and content, is needed"):
        load("sogou_news", tmp_path / "parquet")


def test_a_line_of_names_above_the_news_is_no_row(tmp_path: Path) -> None:
    """As in Kaggle's copy of AG News."""
    write_news(tmp_path / "plain" / "ag_news")
    folder = tmp_path / "named" / "ag_news"
    write_news(folder)
    for path in folder.iterdir():
        path.write_text(f"Class Index,Title,Description\n{path.read_text()}")
    one, other = (load("ag_news(length=9)", tmp_path / root) for root in ("plain", "named"))
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.labels, other.labels)


def test_domains_of_reviews_are_natural_clients(tmp_path: Path) -> None:
    write_reviews(tmp_path / "amazon_reviews")
    data = load("amazon_reviews(length=4)", tmp_path)
    assert data.class_names == ("negative", "positive")
    split = partitions.make("natural").split(data, 2)
    assert [part.tolist() for part in split.train] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [part.tolist() for part in split.test] == [[8, 9], [10, 11]]
    some = load("amazon_reviews(length=4, domains=dvd)", tmp_path)
    assert some.sites is not None
    assert (set(some.sites), len(some.train), len(some.test)) == ({"dvd"}, 4, 2)
    with pytest.raises(FedStrataError, match=r"no domain in .* called 'dvds'"):
        load("amazon_reviews(domains=books+dvds)", tmp_path)


def test_users_of_tweets_are_natural_clients_by_their_numbers_of_tweets(tmp_path: Path) -> None:
    write_tweets(tmp_path / "sentiment140")
    data = load("sentiment140(users=2, length=6)", tmp_path)
    assert data.sites is not None
    assert data.sites.tolist() == ["anna"] * 10 + ["bob"] * 4
    assert data.test.tolist() == [2, 7, 12]  # a fifth of each class of each user, evenly spaced
    assert data.vocabulary is not None
    tokens = data.vocabulary.tokens
    assert tokens[:4] == ("[PAD]", "[UNK]", "[CLS]", "day")
    assert {"café", "\xa3"} <= set(tokens)  # in Latin-1
    assert [tokens[number] for number in data.inputs[10]] == ["[CLS]", "so", '"', "good", '"', ","]
    assert [tokens[number] for number in data.inputs[2]][:4] == ["[CLS]", "sad", "day", "[UNK]"]  # 2 only tests
    assert data.labels.tolist() == [0] * 5 + [1] * 9
    split = partitions.make("natural").split(data, 2)
    assert split.sizes.tolist() == [8, 3] if isinstance(split.sizes, np.ndarray) else list(split.sizes) == [8, 3]
    for text, users in [
        ("users=none", {"anna", "bob", "cid", "dora"}),
        ("users=2, skip=1", {"bob", "dora"}),
        ("users=none, at_least=2", {"anna", "bob", "dora"}),
    ]:
        found = load(f"sentiment140({text})", tmp_path).sites
        assert found is not None
        assert set(found) == users
    with pytest.raises(FedStrataError, match=r"15 users with at least 1 tweets .* but there are 4"):
        load("sentiment140", tmp_path)


def test_a_given_vocabulary_is_taken_as_it_is(tmp_path: Path) -> None:
    write_news(tmp_path / "ag_news")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\noil\n##s\nrise\n")
    for path in ("vocab.txt", tmp_path / "vocab.txt"):
        data = load(f"ag_news(length=5, vocabulary='{path}')", tmp_path)
        assert data.inputs[0].tolist() == [2, 4, 6, 5, 3]  # oil rise ##s
    with pytest.raises(FedStrataError, match="leave 'words' out"):
        datasets.make("ag_news(words=10, vocabulary=vocab.txt)")
    with pytest.raises(FedStrataError, match=r"no vocabulary 'other\.txt'"):
        load("ag_news(vocabulary=other.txt)", tmp_path)
    assert datasets.make("ag_news(vocabulary=vocab.txt)").local_values() == {}
    assert datasets.make("ag_news(vocabulary='/etc/vocab.txt')").local_values() == {"vocabulary": "/etc/vocab.txt"}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("ag_news", b'"3","a","b"\n"1","only two"\n', "Expected 3 columns"),
        ("ag_news", b'"3","a","b"\n"9","a","b"\n', "row 2 has the class '9' instead of one of 1, 2, 3, 4"),
        ("ag_news", b'"3","a","\xff\xfe"\n', "UTF-?8"),
        ("sogou_news", b"", "Empty CSV"),
        ("ag_news", b'"3","a","never ends\n' * 3, "damaged or of another kind"),
    ],
)
def test_damaged_news_get_a_sentence(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    write_news(tmp_path / name)
    (tmp_path / name / "train.csv").write_bytes(content)
    with pytest.raises(FedStrataError, match=reason):
        load(name, tmp_path)


def test_damaged_reviews_and_tweets_get_a_sentence(tmp_path: Path) -> None:
    write_reviews(tmp_path / "a" / "amazon_reviews", [0, 2] * 4)
    with pytest.raises(FedStrataError, match="whole numbers from 0 to 1"):
        load("amazon_reviews", tmp_path / "a")
    write_reviews(tmp_path / "b" / "amazon_reviews")
    shard = tmp_path / "b" / "amazon_reviews" / "train-00000-of-00001.parquet"
    pq.write_table(pa.table({"text": ["a", None], "label": [0, 1], "domain": ["x", "y"]}), shard)
    with pytest.raises(FedStrataError, match="some texts or labels are empty"):
        load("amazon_reviews", tmp_path / "b")
    pq.write_table(pa.table({"text": ["a"], "label": [0]}), shard)
    with pytest.raises(FedStrataError, match=r"has the columns text, label; 'domain' is needed"):
        load("amazon_reviews", tmp_path / "b")
    shard.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(FedStrataError, match="damaged or of another kind"):
        load("amazon_reviews", tmp_path / "b")
    write_tweets(tmp_path / "c" / "sentiment140", [(2, "anna", "so so")])
    with pytest.raises(FedStrataError, match="class '2' instead of one of 0, 4"):
        load("sentiment140", tmp_path / "c")
    with pytest.raises(FedStrataError, match=rf"in none of .*{FILE}"):
        load("sentiment140", tmp_path / "d")


@real_files
def test_the_real_test_part_of_ag_news() -> None:
    data = load("ag_news(part=test, words=500, length=16)", REAL)
    assert (len(data.train), len(data.test), data.input_shape) == (5700, 1900, (16,))
    assert np.bincount(data.labels.numpy()).tolist() == [1900] * 4
    assert data.vocabulary is not None
    assert len(data.vocabulary.tokens) == 500
    assert data.vocabulary.tokens[:5] == ("[PAD]", "[UNK]", ".", "the", ",")
    decoded = [data.vocabulary.tokens[number] for number in data.inputs[0]]
    assert decoded[:6] == ["[UNK]", "for", "t", "n", "[UNK]", "after"]


@real_files
def test_the_real_domains() -> None:
    data = load("amazon_reviews(domains=books+dvd+electronics+kitchen_housewares, words=300, length=8)", REAL)
    assert data.sites is not None
    assert (len(data.train), len(data.test)) == (6398, 1600)
    split = partitions.make("natural").split(data, 4)
    assert sorted(len(part) for part in split.train) == [1598, 1600, 1600, 1600]
    assert [len(part) for part in split.test] == [400] * 4


def test_rows_are_written_as_csv_writes_them(tmp_path: Path) -> None:
    """The small files above are what Python's own writer makes of the same rows."""
    write_news(tmp_path / "ag_news")
    with (tmp_path / "ag_news" / "train.csv").open(newline="") as file:
        assert next(csv.reader(file)) == ["3", "Oil rises", "Oil, at $46\\a barrel"]
