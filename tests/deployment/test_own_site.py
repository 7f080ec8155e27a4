"""The page about one's own data, model and method at a site, followed to the letter: its files, its commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("flwr")

PAGE = (Path(__file__).parents[2] / "docs" / "own-site.md").read_text(encoding="utf-8")
LONGEST = 240
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def blocks() -> list[tuple[str, str, str]]:
    """List the blocks of the page: language, file and text."""
    return re.findall(r'(?ms)^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', PAGE)


def command(line: str, port: str) -> list[str]:
    program, *arguments = shlex.split(line.replace("9092", port))
    programs = {"python": [sys.executable], "fedstrata": [sys.executable, "-m", "fedstrata"]}
    return [*programs[program], *arguments]


def test_the_page_works_as_it_stands(tmp_path):
    """The server and the sites are started as processes that go on; everything else must end well before the next."""
    port, running, printed = free_port(), {}, {}
    with ExitStack() as stack:
        for language, file, text in blocks():
            if file:
                (tmp_path / file).write_text(text, encoding="utf-8")
            for line in [] if language else text.replace("\\\n", " ").splitlines():
                arguments = command(line, port)
                goes_on = re.match(r"fedstrata (server|client)", line) and "--dry-run" not in line
                if goes_on:
                    log = stack.enter_context((tmp_path / f"{len(running)}.log").open("w+"))
                    process = subprocess.Popen(arguments, cwd=tmp_path, stdout=log, stderr=log, env=ENVIRONMENT)
                    stack.callback(process.kill)
                    running[line] = process, log
                    continue
                if line.startswith("python predict.py"):
                    for started, (process, log) in running.items():
                        code = process.wait(timeout=LONGEST)
                        log.seek(0)
                        assert code == 0, (started, log.read())
                done = subprocess.run(
                    arguments, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, timeout=LONGEST
                )
                assert done.returncode == 0 or line.startswith("fedstrata status"), (line, done.stderr)
                printed[line] = done.stdout
        logs = []
        for _, log in running.values():
            log.seek(0)
            logs.append(log.read())
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
