from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch

from fedstrata import files
from fedstrata.errors import FedStrataError, FedStrataWarning


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "note"
    files.write_atomically(path, "Größe\r\n")
    assert path.read_bytes() == "Größe\r\n".encode()
    files.write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert names_in(tmp_path) == ["note"]


def test_others_may_read_what_the_umask_lets_them_read(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    files.write_atomically(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_is_written_at_once(tmp_path: Path) -> None:
    files.write_folder_atomically(tmp_path / "folder", {"a": "1", "b": b"2"})
    assert names_in(tmp_path) == ["folder"]
    assert {name: (tmp_path / "folder" / name).read_text() for name in names_in(tmp_path / "folder")} == {
        "a": "1",
        "b": "2",
    }


def test_a_folder_with_content_is_never_replaced(tmp_path: Path) -> None:
    files.write_folder_atomically(tmp_path / "folder", {"a": "1"})
    with pytest.raises(FedStrataError, match="cannot be written"):
        files.write_folder_atomically(tmp_path / "folder", {"b": "2"})
    assert names_in(tmp_path) == ["folder"]
    assert names_in(tmp_path / "folder") == ["a"]


@pytest.mark.parametrize("failing", ["fsync", "replace", "rename"])
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "the disk is full; free some space"),
        (errno.EDQUOT, "the disk is full; free some space"),
        (errno.EACCES, "permission is missing"),
        (errno.EROFS, "permission is missing"),
        (errno.EIO, "input/output error"),
    ],
)
def test_disk_trouble_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, number: int, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "old").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        if failing != "rename":
            with pytest.raises(FedStrataError, match=message):
                files.write_atomically(tmp_path / "old", "new")
        if failing != "replace":
            with pytest.raises(FedStrataError, match=message):
                files.write_folder_atomically(tmp_path / "folder", {"a": "1", "b": "2"})
    assert names_in(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_folder_atomically(tmp_path / "folder", {"a": "1"})
    assert names_in(tmp_path) == []


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FedStrataError, match="a file stands where a folder is needed"):
            files.make_folder(path)


def test_only_left_overs_are_cleared_away(tmp_path: Path) -> None:
    for name in (".run.01234567.partial", ".other.01234567.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").touch()
    for name in (".run.89abcdef.partial", "run.partial", ".run", "partial"):
        (tmp_path / name).touch()
    files.remove_partials(tmp_path, "run")
    assert names_in(tmp_path) == [".other.01234567.partial", ".run", "partial", "run.partial"]
    files.remove_partials(tmp_path)
    assert names_in(tmp_path) == [".run", "partial", "run.partial"]


def test_names_with_pattern_characters_stand_for_themselves(tmp_path: Path) -> None:
    for name in (".a[1].01234567.partial", ".a1.01234567.partial"):
        (tmp_path / name).touch()
    files.remove_partials(tmp_path, "a[1]")
    assert names_in(tmp_path) == [".a1.01234567.partial"]


def test_a_folder_is_removed(tmp_path: Path) -> None:
    files.write_folder_atomically(tmp_path / "folder", {"a": "1"})
    files.remove_folder(tmp_path / "folder")
    assert names_in(tmp_path) == []


def test_json_for_every_reader() -> None:
    content = {
        "array": np.array([[1, 2]]),
        "number": np.float32(0.5),
        "nothing": [math.nan, np.float64("inf"), np.array([-math.inf])],
        "tuple": ("ä", True, None),
        3: "key",
    }
    assert json.loads(files.to_json(content)) == {
        "array": [[1, 2]],
        "number": 0.5,
        "nothing": [None, None, [None]],
        "tuple": ["ä", True, None],
        "3": "key",
    }


def test_tensors_of_all_kinds_come_back(tmp_path: Path) -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "whole": base,
        "slice": base[1],
        "same": base,
        "transposed": base.T,
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "learnt": torch.nn.Parameter(torch.rand(2)),
        "empty": torch.zeros(0, 3),
        "empty too": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "expanded": torch.ones(1).expand(5),
        "not a number": torch.tensor([math.nan, -0.0, math.inf]),
        **{
            str(kind): torch.tensor([1.5, -2]).to(kind)
            for kind in (torch.float16, torch.bfloat16, torch.float64, torch.uint8)
        },
    }
    content = files.to_safetensors(tensors)
    read = files.from_safetensors(content, tmp_path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        torch.testing.assert_close(read[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    read["whole"] += 1
    assert torch.equal(read["same"], base)
    assert files.to_safetensors(dict(reversed(tensors.items()))) == content
    assert files.from_safetensors(files.to_safetensors({}), tmp_path) == {}
    plain = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    assert content == safetensors.torch.save(plain), "other bytes than the library's"
    assert files.to_safetensors({}) == safetensors.torch.save({})
    assert b"".join(files.safetensors_pieces(tensors, {"größe": '"1"'})) == safetensors.torch.save(
        plain, {"größe": '"1"'}
    )
    with pytest.raises(FedStrataError, match="type complex128 cannot be saved"):
        files.to_safetensors({"a": torch.zeros(1, dtype=torch.complex128)})


def test_content_may_come_in_pieces_and_a_file_may_tell_of_those_before_it(tmp_path: Path) -> None:
    pieces = files.Pieces([b"ab", memoryview(b"c")])
    files.write_folder_atomically(tmp_path / "a", {"first": pieces, "last": lambda: f"{pieces.size} {pieces.sha256}"})
    assert (tmp_path / "a" / "first").read_bytes() == b"abc"
    assert (tmp_path / "a" / "last").read_text() == f"3 {sha256(b'abc').hexdigest()}"


def test_damaged_content_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    schema = pa.schema([("round", pa.int32())])
    for read in (
        lambda content: files.from_json(content, path),
        lambda content: files.from_parquet(content, schema, path),
        lambda content: files.from_safetensors(content, path),
    ):
        for content in (b"", b"nonsense", b"\xff" * 100):
            with pytest.raises(FedStrataError, match="is damaged"):
                read(content)
    with pytest.raises(FedStrataError, match="holds no JSON object"):
        files.from_json(b"[]", path)
    with pytest.raises(FedStrataError, match="columns"):
        files.from_parquet(files.to_parquet(pa.table({"other": [1]})), schema, path)
    with pytest.raises(FedStrataError, match="cannot be read: no such file"):
        files.read_bytes(path)


def test_one_lock_at_a_time(tmp_path: Path) -> None:
    first = files.WriteLock(tmp_path)
    with pytest.raises(FedStrataError, match="is being written by another process"):
        files.WriteLock(tmp_path)
    first.release()
    first.release()
    files.WriteLock(tmp_path).release()


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = files.WriteLock(tmp_path)
    ours, theirs = socket.socketpair()
    worker = os.fork()
    if worker == 0:
        ours.close()
        theirs.send(b"alive")
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    try:
        assert ours.recv(5) == b"alive"
        with pytest.raises(FedStrataError, match="another process"):
            files.WriteLock(tmp_path)
        lock.release()
        files.WriteLock(tmp_path).release()
        assert os.waitpid(worker, os.WNOHANG) == (0, 0)
    finally:
        ours.close()
        os.waitpid(worker, 0)


def test_a_disk_without_locks_gets_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.warns(FedStrataWarning, match="cannot be locked"):
        files.WriteLock(tmp_path).release()


def test_a_long_file_comes_down_to_the_disk_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stretch is whole on the disk before it leaves the memory; what is left comes with the end of the file."""
    down = []
    monkeypatch.setattr(files, "_STRETCH", 5)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: down.append(os.fstat(descriptor).st_size))
    files.write_atomically(tmp_path / "long", files.Pieces([b"abc", b"def", b"gh", b"ijklmnop", b"q"]))
    assert (tmp_path / "long").read_bytes() == b"abcdefghijklmnopq"
    assert down == [6, 16]
    files.write_atomically(tmp_path / "short", b"abc")
    assert down == [6, 16]


@pytest.mark.parametrize("shape", [(0,), (2000,), (1001, 1), (300, 5), (5, 300)])
def test_many_whole_numbers_are_written_as_few_are(shape):
    numbers = np.arange(np.prod(shape)).reshape(shape) - 7
    content = {"deep": [{"numbers": numbers, "text": "a, b"}], "numbers": numbers, "last": numbers[:1]}
    plain = {"deep": [{"numbers": numbers.tolist(), "text": "a, b"}], "numbers": numbers.tolist()}
    plain["last"] = numbers[:1].tolist()
    assert files.to_json(content) == json.dumps(plain, indent=2) + "\n"
    assert files.to_json([numbers, numbers]) == json.dumps([numbers.tolist()] * 2, indent=2) + "\n"


# Columns --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [([3, -1, 2], pa.int8()), ([0.5, math.nan, -math.inf], pa.float64()), ([], pa.int32()), ([2**40], pa.int64())],
)
def test_columns_are_those_of_pyarrow(numbers, kind):
    ours, theirs = (
        pa.table({"numbers": column}) for column in (files.column_of(np.array(numbers), kind), pa.array(numbers, kind))
    )
    assert files.to_parquet(ours) == files.to_parquet(theirs)


def test_texts_are_given_by_their_places():
    column = files.texts_of(np.array([1, 1, 2, 0]), ["", "zwölf ☃", "b"])
    assert column.to_pylist() == ["zwölf ☃", "zwölf ☃", "b", ""]
    assert column.type == pa.string()
    assert files.texts_of(np.array([], dtype=np.int64), []).to_pylist() == []
