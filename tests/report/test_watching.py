"""Runs as they are seen from outside, and the server that shows them: who fares how, and who may look."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from going_runs import GoingRun
from made_up_runs import write_run

from fedstrata import files
from fedstrata.errors import FedStrataError
from fedstrata.report import document, watching
from fedstrata.report.serving import PageServer, is_meant_for
from fedstrata.report.watching import State, Watched, Watcher, find_runs


@pytest.fixture(autouse=True)
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build pages without charts, which other tests draw."""
    for module in (watching, document):
        monkeypatch.setattr(module, "charts_are_possible", lambda: False)


@contextmanager
def served(*places: Path, **options: Any) -> Iterator[PageServer]:
    server = PageServer(Watcher(places), **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(
    server: PageServer, path: str = "/data.json", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    answer = reply.status, dict(reply.getheaders()), reply.read()
    connection.close()
    return answer


def states(body: str) -> dict[str, tuple[str, str]]:
    """What the panel says of each run: its state and its rounds."""
    found = re.findall(r'class="state (\w+)".*?class="name">(.*?)</span><span class="rounds">(.*?)</span>', body)
    return {name: (state, rounds) for state, name, rounds in found}


def panel(server: PageServer) -> dict[str, tuple[str, str]]:
    return states(json.loads(ask(server)[2])["body"])


def test_a_run_is_seen_running_dead_stopped_and_finished(tmp_path: Path) -> None:
    with GoingRun(tmp_path / "run") as run:
        run.step()
        assert Watched.look(run.path).state == State.RUNNING
    assert Watched.look(run.path).state == State.DIED
    other = GoingRun(tmp_path / "other")
    other.stop()
    assert Watched.look(other.path).state == State.STOPPED
    finished = Watched.look(write_run(tmp_path / "finished"))
    assert finished.state == State.FINISHED
    assert abs(finished.at - time.time()) < 60


def test_to_ask_who_writes_keeps_nobody_from_writing(tmp_path: Path) -> None:
    assert files.is_being_written(tmp_path) is False
    lock = files.WriteLock(tmp_path)
    assert files.is_being_written(tmp_path) is True
    lock.release()
    assert files.is_being_written(tmp_path) is False
    files.WriteLock(tmp_path).release()


def test_runs_are_found_two_folders_deep_and_unfinished_folders_are_not(tmp_path: Path) -> None:
    for name in ("a", "compare/b", "compare/deep/c", ".d.01234567.partial"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "experiment.toml").touch()
    assert find_runs([tmp_path]) == [tmp_path / "a", tmp_path / "compare" / "b"]
    assert find_runs([tmp_path / "a", tmp_path / "missing"]) == [tmp_path / "a"]


def test_rounds_and_runs_appear_and_nothing_new_is_not_sent_again(tmp_path: Path) -> None:
    with served(tmp_path / "runs") as server:
        assert "There is no run in" in json.loads(ask(server)[2])["body"]
        with GoingRun(tmp_path / "runs" / "a", method="fedbn") as run:
            server.watcher._not_before = 0
            assert panel(server) == {"a": ("running", "before its first round, of 12")}
            run.step()
            server.watcher._not_before = 0
            status, headers, body = ask(server)
            assert states(json.loads(body)["body"]) == {"a": ("running", "round 1 of 12")}
            assert "fedbn" in json.loads(body)["title"]
            again = ask(server, If_None_Match=headers["ETag"])
            assert (again[0], again[2]) == (304, b"")
            run.step()
            write_run(tmp_path / "runs" / "b" / "c", method="fedavg")
            server.watcher._not_before = 0
            status, _, body = ask(server, If_None_Match=headers["ETag"])
            assert status == 200
            assert states(json.loads(body)["body"]) == {
                "a": ("running", "round 2 of 12"),
                "b/c": ("finished", "12 rounds"),
            }
        server.watcher._not_before = 0
        assert panel(server)["a"] == ("died", "round 2 of 12")


def test_a_damaged_folder_is_told_and_the_others_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    write_run(tmp_path / "<b>bad</b>")
    (tmp_path / "<b>bad</b>" / "data.json").unlink()
    with served(tmp_path) as server:
        found = panel(server)
    assert found["good"] == ("finished", "12 rounds")
    state, words = found["&lt;b&gt;bad&lt;/b&gt;"]
    assert state == "unreadable"
    assert "lacks data.json" in words


def test_pages_are_built_in_a_share_of_the_time(tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    with GoingRun(tmp_path / "a") as run:
        run.step()
        watcher = Watcher([tmp_path], clock=clock)
        first = watcher.current()
        run.step()
        second = watcher.current()
        assert second is not first
        assert now[0] == 2.5  # the second page was built from 2 to 2.5, so that the next may come at 4.5
        run.step()
        assert watcher.current() is second
        now[0] = 4.5
        assert watcher.current() is not second


def test_only_the_page_and_its_news_are_served_and_only_to_get(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    with served(tmp_path) as server:
        status, headers, page = ask(server, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert (headers["Referrer-Policy"], headers["X-Content-Type-Options"]) == ("no-referrer", "nosniff")
        policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', page.decode())
        assert policy is not None
        assert "connect-src &#x27;self&#x27;" in policy.group(1)
        assert "default-src &#x27;none&#x27;" in policy.group(1)
        for path in ("/a/experiment.toml", "/../a/data.json", "/favicon.ico", "/data.json/"):
            assert ask(server, path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "FOO"):
            status, headers, _ = ask(server, "/", method)
            assert (status, headers["Allow"]) == (405, "GET"), method


def test_names_that_are_made_to_point_here_are_refused(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert ask(server, "/", Host="evil.example")[0] == 421
        assert ask(server, "/", Host="127.0.0.1.evil.example:80")[0] == 421
        assert ask(server, "/", Host="")[0] == 421
        assert ask(server, "/", Host="192.168.1.7")[0] == 421
        for host in ("localhost", "localhost:1234", "127.0.0.1", "[::1]:9"):
            assert ask(server, "/", Host=host)[0] == 200, host
    assert not is_meant_for("evil.example", "0.0.0.0")
    assert not is_meant_for("[", "0.0.0.0")
    assert is_meant_for("my-box:80", "my-box")


def test_others_need_the_token(tmp_path: Path) -> None:
    with served(tmp_path, host="0.0.0.0") as server:
        token = server.token
        assert token is not None
        assert len(token) >= 32
        assert re.fullmatch(rf"http://[^/]+:\d+/\?token={token}", server.url)
        assert ask(server, "/")[0] == ask(server)[0] == ask(server, "/other")[0] == 403
        for wrong in (token[:-1], token + "A", "", "%C3%BC"):
            assert ask(server, f"/?token={wrong}")[0] == 403
        status, headers, _ = ask(server, f"/?token={token}")
        assert status == 200
        cookie = headers["Set-Cookie"]
        assert cookie == f"fedstrata-{server.server_address[1]}={token}; Path=/; HttpOnly; SameSite=Strict"
        assert ask(server, Cookie=cookie.split(";")[0])[0] == 200
        assert ask(server, Cookie=f"a=b; {cookie.split(';')[0]}")[0] == 200
        assert ask(server, Authorization=f"Bearer {token}")[0] == 200
        assert ask(server, Authorization="Bearer no", Cookie="x", Host="evil.example")[0] == 421
        assert ask(server, Authorization="Bearer no")[0] == 403
    with served(tmp_path) as server:
        assert server.token is None
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"
    with served(tmp_path, with_token=True) as server:
        assert ask(server, "/")[0] == 403


def test_a_port_that_is_taken_is_told_in_a_sentence(tmp_path: Path) -> None:
    with served(tmp_path) as server, pytest.raises(FedStrataError, match="choose another --port"):
        PageServer(Watcher([tmp_path]), port=server.server_address[1])


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_real_run_is_watched_and_its_death_is_seen(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedstrata"]
    pipes: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    watch = subprocess.Popen([*command, "watch", "runs", "--json"], **pipes)
    settings = {"clients": 10, "rounds": 100_000, "epochs": 2, "checkpoint-every": 1000}
    given = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    run = subprocess.Popen([*command, "run", *given, "--out", "runs/a", "--quiet"], **pipes)
    try:
        assert watch.stdout is not None
        address = json.loads(watch.stdout.readline())["url"]
        port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", address).group(1))  # type: ignore[union-attr]

        def told() -> tuple[str, str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=180)
            connection.request("GET", "/data.json")
            body = json.loads(connection.getresponse().read())["body"]
            return states(body).get("a", ("", ""))

        def rounds() -> int:
            found = re.match(r"round (\d+) of", told()[1])
            return int(found.group(1)) if found else 0

        wait_for(lambda: rounds() >= 1)
        first = rounds()
        wait_for(lambda: rounds() > first)
        assert told()[0] == "running"
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)
        wait_for(lambda: told()[0] == "died")
        assert rounds() > first
    finally:
        run.kill()
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=60)
    assert watch.returncode == 130
    assert errors.decode().strip() == "Stopped: The page is served no more. Runs are not touched by that."
