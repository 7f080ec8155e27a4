"""The page about one's own data, model and method at a site, followed to the letter: its files, its commands."""

from __future__ import annotations

import json
import re
import shlex
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from forking import Forked, finished

PAGE = (Path(__file__).parents[2] / "docs" / "own-site.md").read_text(encoding="utf-8")
LONGEST = 240


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def blocks() -> list[tuple[str, str, str]]:
    """List the blocks of the page: language, file and text."""
    return re.findall(r'(?ms)^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', PAGE)


def arguments_of(line: str, port: str) -> list[str]:
    program, *arguments = shlex.split(line.replace("9092", port))
    assert program in ("python", "fedstrata")
    return arguments


def test_the_page_works_as_it_stands(tmp_path):
    """The server and the sites are started as processes that go on; everything else must end well before the next.

    Only the server's report, which takes longer than the run, is left out.
    """
    port, running, printed = free_port(), {}, {}
    with ExitStack() as stack:
        for language, file, text in blocks():
            if file:
                (tmp_path / file).write_text(text, encoding="utf-8")
            for line in [] if language else text.replace("\\\n", " ").splitlines():
                arguments = arguments_of(line, port)
                goes_on = re.match(r"fedstrata (server|client)", line) and "--dry-run" not in line
                if goes_on:
                    arguments += ["--no-report"] if "--sites" in arguments else []
                    running[line] = Forked(tmp_path / f"{len(running)}.log", *arguments, folder=tmp_path)
                    stack.callback(running[line].kill)
                    continue
                if line.startswith("python predict.py"):
                    for started, process in running.items():
                        assert process.wait(timeout=LONGEST) == 0, (started, process.log.read_text())
                done = finished(*arguments, folder=tmp_path, path=[tmp_path], timeout=LONGEST)
                assert done.returncode == 0 or line.startswith("fedstrata status"), (line, done.stderr)
                printed[line] = done.stdout
        logs = [process.log.read_text() for process in running.values()]
    assert len(running) == 3
    expected = blocks()[-1][2]
    assert printed["python predict.py"] == expected
    shape = re.sub(r"[\d.]+", "N", next(text for language, _, text in blocks() if language == "text").strip())
    assert shape in re.sub(r"[\d.]+", "N", logs[1])
    assert "this site's own model after round 3 is saved in 'berlin-model'" in logs[1]
    assert "runs/consortium/model.safetensors" in logs[0]
    assert "fedstrata compare" not in logs[0], "a server without data suggests nothing that needs data"
    cards = [json.loads((tmp_path / f"{name}-model" / "model.json").read_text()) for name in ("berlin", "paris")]
    assert cards[0]["preprocessing"] == cards[1]["preprocessing"], "by the patients of both"
    assert cards[0]["metrics"]["accuracy"] > 0.8
