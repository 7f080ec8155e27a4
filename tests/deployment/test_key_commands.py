"""The commands for keys, as an operator uses them, and those of the documentation as they stand there."""

from __future__ import annotations

import datetime
import getpass
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from typer.main import get_command

from fedstrata.cli import app, main
from fedstrata.deployment.certificates import facts_of, read_certificate
from fedstrata.deployment.keys import KeyFolder, is_protected, make_keys, read_private_key
from fedstrata.deployment.sites_file import SitesFile, public_line

DOCS = Path(__file__).parents[2] / "docs" / "trust.md"
PASSPHRASE = "correct horse battery"
SERVER = ("server", "--sites", "keys/server/sites.toml", "--method", "fedbn", "--tls", "keys/server")
CLIENT = ("client", "--server", "127.0.0.1:1", "--site", "berlin", "--keys", "keys/sites/berlin")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is typed at a terminal, one answer after the other; the last one again and again."""
    answers = [PASSPHRASE]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(getpass, "getpass", lambda question: answers.pop(0) if len(answers) > 1 else answers[0])
    return answers


def make(days_ago: int = 0, **options: object) -> None:
    begun = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days_ago)
    make_keys(Path("keys"), ["fl.example.org"], ["berlin", "paris"], now=begun, **options)


def passphrase_file(content: str = PASSPHRASE + "\n", mode: int = 0o600) -> str:
    path = Path("passphrase")
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def test_the_section_about_keys_works_as_it_stands(call, typed, tmp_path):
    section = DOCS.read_text().partition("\n## Keys\n")[2].partition("\n## ")[0]
    Path("experiment.toml").write_text('method = "fedbn"\n')
    assert call("keys", "--host", "fl.example.org", *(f"--site={name}" for name in ("berlin", "paris", "rome")))[0] == 0
    commands = re.findall(r"(?m)^fedstrata .*$", section)
    for command in commands:
        more = ["--dry-run"] if command.startswith("fedstrata server") else []
        code, _, err = call(*shlex.split(command)[1:], *more)
        assert (code, err) == (0, ""), command
    list_of_sites = SitesFile.read(Path("keys/server/sites.toml"))
    assert list_of_sites.names == ["berlin", "paris", "oslo"]
    assert list_of_sites.members[0].old_key is None, "the second rotation ends the overlap"
    assert is_protected(Path("protected/authority.key"))
    assert {command.split()[2] for command in commands if command.startswith("fedstrata keys")} == {
        *get_command(app).commands["keys"].commands, "--host",
    }  # fmt: skip


@pytest.mark.parametrize("verb", get_command(app).commands["keys"].commands)
def test_the_help_of_every_verb_explains_every_option(call, verb):
    code, out, _ = call("keys", verb, "--help")
    text = " ".join(out.split())
    assert code == 0
    for one in get_command(app).commands["keys"].commands[verb].params:
        assert one.help, one.name
        assert one.help in text, one.name


def test_a_site_hands_over_its_public_line_and_gets_certificates(call):
    make()
    code, out, _ = call("keys", "site", "oslo", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["key"] == public_line(read_private_key(Path("oslo/site.key")).public_key())
    assert "PRIVATE" not in out
    code, out, _ = call("keys", "add", "oslo", "--key", told["key"], "--json")
    assert (code, json.loads(out)["folder"]) == (0, "keys/sites/oslo")
    assert SitesFile.read(Path("keys/server/sites.toml")).names == ["berlin", "paris", "oslo"]
    assert call("keys", "site", "oslo")[0] == 2


def test_a_server_that_has_nothing_but_the_list_can_change_it(call):
    make()
    Path("keys/server/sites.toml").rename("sites.toml")
    assert call("keys", "remove", "paris", "--sites", "sites.toml", "--keys", "nowhere", "--json")[0] == 0
    call("keys", "site", "berlin", "--out", "mine")
    code, out, _ = call("keys", "rotate", "berlin", "--key", "mine/site.pub", "--sites", "sites.toml", "--keys", "no")
    assert code == 0
    assert "no certificate was made" in out
    assert not Path("no").exists()
    assert SitesFile.read(Path("sites.toml")).names == ["berlin"]


def test_dates_are_told_and_renewed(call):
    make(days_ago=340)
    code, out, err = call(*SERVER, "--dry-run", "--json")
    ends = facts_of(read_certificate(Path("keys/server/server.pem"))).ends
    assert code == 0
    assert json.loads(out)["certificate_until"] == f"{ends:%Y-%m-%d}"
    assert "expires on" in err
    assert "fedstrata keys renew" in err
    code, out, _ = call("keys", "renew", "keys", "--days", "500", "--host", "new.example.org", "--json")
    assert code == 0
    code, out, _ = call("keys", "show", "--json")
    items = {item["file"]: item for item in json.loads(out)}
    assert items["server/server.pem"]["whose"] == "new.example.org"
    assert items["sites/berlin/site.pem"]["remark"] == "expires soon"


@pytest.mark.attack(
    "A server is started with a certificate that has expired, or with a private key or a passphrase file that others "
    "can read.",
    "It does not start; one sentence names the file, the date, and the command that helps.",
)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("expired", "has expired on"),
        ("key", "chmod 600 keys/server/server.key"),
        ("passphrase", "chmod 600 passphrase"),
    ],
)
def test_a_server_does_not_start_with_what_protects_nothing(how, words, call):
    make(days_ago=366 if how == "expired" else 0, passphrase=PASSPHRASE)
    if how == "key":
        Path("keys/server/server.key").chmod(0o644)
    given = passphrase_file(mode=0o640 if how == "passphrase" else 0o600)
    code, out, err = call(*SERVER, "--passphrase-file", given)
    assert (code, out) == (2, "")
    assert words in err
    if how == "expired":
        assert "fedstrata keys renew" in err


def test_a_site_does_not_start_with_an_expired_certificate(call):
    make(days_ago=366)
    code, _, err = call(*CLIENT)
    assert code == 2
    assert "'keys/sites/berlin/site.pem' has expired on" in err
    assert "keys renew --site berlin" in err


@pytest.mark.parametrize(
    ("command", "file", "words"),
    [
        (SERVER, None, "no terminal"),
        (SERVER, "something else entirely\n", "'keys/server/server.key' is wrong"),
        (SERVER, "", "is empty"),
        (CLIENT, None, "no terminal"),
        (CLIENT, "something else entirely\n", "'keys/sites/berlin/site.key' is wrong"),
        (("keys", "renew"), "something else entirely\n", "'keys/authority.key' is wrong"),
        (("keys", "rotate", "paris"), None, "no terminal"),
        (("keys", "passphrase", "keys/authority.key", "--none"), "something else entirely\n", "is wrong"),
    ],
)
def test_a_missing_or_wrong_passphrase_is_one_sentence(command, file, words, call):
    make(passphrase=PASSPHRASE)
    before = Path("keys/server/sites.toml").read_text()
    code, out, err = call(*command, *(() if file is None else ("--passphrase-file", passphrase_file(file))))
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
    assert Path("keys/server/sites.toml").read_text() == before


def test_passphrases_come_from_a_terminal_or_a_file(call, typed):
    typed[:] = [PASSPHRASE, "another one, mistyped"]
    code, _, err = call("keys", "--host", "here", "--site", "berlin", "--passphrase")
    assert (code, "differ" in err, Path("keys").exists()) == (2, True, False)
    typed[:] = [PASSPHRASE]
    assert call("keys", "--host", "here", "--site", "berlin", "--site", "paris", "--passphrase")[0] == 0
    for path in Path("keys").rglob("*.key"):
        assert read_private_key(path, PASSPHRASE)
    assert call(*SERVER, "--dry-run")[0] == 0
    assert call("keys", "rotate", "paris", "--passphrase-file", passphrase_file(), "--passphrase")[0] == 0
    assert is_protected(Path("keys/sites/paris/site.key"))
    new = Path("new")
    new.write_text("a quite different one\n")
    new.chmod(0o600)
    given = ("--passphrase-file", "passphrase", "--new-passphrase-file", "new")
    assert call("keys", "passphrase", "keys/authority.key", *given)[0] == 0
    folder = KeyFolder(Path("keys"), datetime.datetime.now(datetime.UTC))
    assert folder.authority("a quite different one")
    assert call("keys", "passphrase", "keys/authority.key", "--none", "--passphrase-file", "new")[0] == 0
    assert folder.authority(None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("keys",), "at least one --host"),
        (("keys", "--host", "here"), "at least one --site"),
        (("keys", "shwo"), "Did you mean 'show'?"),
        (("keys", "add", "oslo", "--key", "ssh-rsa AAAA"), "no public ECDSA key"),
        (("keys", "add", "oslo", "--key", "nowhere.pub"), "nowhere.pub"),
        (("keys", "renew", "nowhere"), "nowhere/authority.key"),
        (("keys", "show", "nowhere"), "no folder 'nowhere'"),
        ((*SERVER[:-2], "--address", "127.0.0.1:1", "--mutual-tls"), "--mutual-tls needs TLS"),
    ],
)
def test_mistakes_are_sentences(arguments, words, call):
    make()
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
