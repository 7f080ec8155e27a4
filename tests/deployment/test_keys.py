"""A folder of keys over its years: certificates that end, sites that come, change and go, and passphrases."""

from __future__ import annotations

import datetime
import hashlib
import ssl
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedstrata.deployment.certificates import check_dates, check_pair, facts_of, hosts_of, read_certificate
from fedstrata.deployment.inventory import take_inventory
from fedstrata.deployment.keys import (
    KeyFolder,
    change_passphrase,
    check_mode,
    make_keys,
    make_site_key,
    read_private_key,
)
from fedstrata.deployment.roll import Roll
from fedstrata.deployment.sites_file import SitesFile, fingerprint, public_line, same_keys
from fedstrata.errors import FedStrataError

NOW = datetime.datetime(2030, 5, 1, 12, tzinfo=datetime.UTC)
PASSPHRASE = "correct horse battery"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["fl.example.org", "10.0.0.7"], ["berlin", "paris", "rome"], now=NOW)
    return tmp_path / "keys"


@pytest.fixture
def made(folder: Path) -> KeyFolder:
    return KeyFolder(folder, NOW + timedelta(days=100))


def members(made: KeyFolder) -> SitesFile:
    return SitesFile.read(made.sites_file)


# Certificates ---------------------------------------------------------------------------------------------------------


def test_a_certificate_is_good_for_its_purpose_only(folder):
    purposes = {
        name: list(read_certificate(folder / name).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        for name in ("server/server.pem", "sites/rome/site.pem")
    }
    assert purposes == {
        "server/server.pem": [ExtendedKeyUsageOID.SERVER_AUTH],
        "sites/rome/site.pem": [ExtendedKeyUsageOID.CLIENT_AUTH],
    }
    authority = read_certificate(folder / "server" / "ca.pem")
    assert authority.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert (facts_of(authority).ends - NOW).days == 3650


def test_a_renewed_certificate_is_for_the_same_key_and_hosts_and_holds_longer(made):
    path = made.folder / "server" / "server.pem"
    before = read_certificate(path)
    facts = made.renew_server(made.authority(None))
    after = read_certificate(path)
    assert hosts_of(after) == hosts_of(before) == ["fl.example.org", "10.0.0.7"]
    assert after.public_key() == before.public_key()
    assert facts.ends == NOW + timedelta(days=100 + 365)
    assert facts.whose == "fl.example.org, 10.0.0.7"
    after.verify_directly_issued_by(read_certificate(made.folder / "sites" / "rome" / "ca.pem"))
    assert hosts_of(read_certificate(path)) != made.renew_server(made.authority(None), ["new.org"]).whose


def test_what_is_signed_ends_with_its_authority_which_can_be_renewed_itself(folder):
    last_days = KeyFolder(folder, NOW + timedelta(days=3600))
    assert last_days.renew_server(last_days.authority(None)).ends == NOW + timedelta(days=3650)
    later = KeyFolder(folder, NOW + timedelta(days=3651))
    with pytest.raises(FedStrataError, match=r"authority has expired on 2040-04-28; .*--authority"):
        later.renew_server(later.authority(None))
    later.renew_authority(None)
    renewed = read_certificate(folder / "sites" / "rome" / "ca.pem")
    later.renew_server(later.authority(None))
    read_certificate(folder / "server" / "server.pem").verify_directly_issued_by(renewed)


@pytest.mark.parametrize(
    ("days", "words"), [(-1, "is the clock right"), (364, "expires on 2031-05-01, in 1 days"), (366, "has expired on")]
)
def test_the_date_of_a_certificate_is_told(folder, days, words):
    path, then = folder / "server" / "server.pem", NOW + timedelta(days=days)
    if days == 364:
        facts, soon = check_dates(path, then, "fedstrata keys renew")
        assert words in (soon or "")
        assert check_dates(path, NOW + timedelta(days=300), "fedstrata keys renew") == (facts, None)
        return
    with pytest.raises(FedStrataError, match=words):
        check_dates(path, then, "fedstrata keys renew")


def test_a_certificate_of_another_key_is_refused(folder):
    with pytest.raises(FedStrataError, match="belongs to another key"):
        check_pair(folder / "server" / "server.pem", folder / "sites" / "rome" / "site.key", None)


# The list of sites ----------------------------------------------------------------------------------------------------


def test_editing_a_site_leaves_everything_else_as_it_is(made):
    text = "# by hand\n[rules]\nmin_sites = 2 # two\n" + made.sites_file.read_text() + "\n# the end\n"
    made.sites_file.write_text(text)
    before = members(made)
    made.rotate("paris", None, made.sites_file, None)
    made.remove("rome", made.sites_file)
    after = made.sites_file.read_text()
    assert after.startswith("# by hand\n[rules]\nmin_sites = 2 # two\n# Who may take part")
    assert after.endswith("# the end\n")
    assert [one.name for one in members(made).members] == ["berlin", "paris", "rome"]
    assert members(made).names == ["berlin", "paris"]
    assert members(made).rules == before.rules
    assert public_line(before.members[0].public_key) in after
    assert public_line(before.members[1].public_key) not in after


def test_a_rotated_key_is_the_new_one_and_for_a_while_the_old_one(made):
    old = members(made).find("berlin").public_key
    new = made.rotate("berlin", None, made.sites_file, made.authority(None), timedelta(days=7))
    site = made.folder / "sites" / "berlin"
    assert read_private_key(site / "site.key").public_key() == new
    check_pair(site / "site.pem", site / "site.key", None)
    member = members(made).find("berlin")
    assert same_keys(member.keys(made.now + timedelta(days=6)), [old, new])
    assert same_keys(member.keys(made.now + timedelta(days=8)), [new])
    again = made.rotate("berlin", None, made.sites_file, None)
    assert same_keys(members(made).find("berlin").keys(made.now), [again])
    assert not (site / "site.pem").exists(), "it belongs to another key"


def test_a_site_makes_its_own_key_and_hands_over_the_public_one(made, tmp_path):
    own = make_site_key(tmp_path / "paris")
    made.rotate("paris", own, made.sites_file, made.authority(None))
    site = made.folder / "sites" / "paris"
    assert sorted(path.name for path in site.iterdir()) == ["ca.pem", "site.pem"], "no private key"
    check_pair(site / "site.pem", tmp_path / "paris" / "site.key", None)
    with pytest.raises(FedStrataError, match="another one is needed"):
        made.rotate("paris", own, made.sites_file, None)
    with pytest.raises(FedStrataError, match="never overwritten"):
        make_site_key(tmp_path / "paris")


def test_sites_come_and_go_and_come_back_with_another_key(made):
    made.add("oslo", None, made.sites_file, made.authority(None))
    assert members(made).names == ["berlin", "paris", "rome", "oslo"]
    old = members(made).find("paris").public_key
    made.remove("paris", made.sites_file)
    assert members(made).find("paris").keys(made.now) == ()
    with pytest.raises(FedStrataError, match="before"):
        made.remove("paris", made.sites_file)
    with pytest.raises(FedStrataError, match="puts it back"):
        made.rotate("paris", None, made.sites_file, None)
    with pytest.raises(FedStrataError, match="another one is needed"):
        made.add("paris", old, made.sites_file, None)
    made.add("paris", None, made.sites_file, None)
    assert members(made).names == ["berlin", "paris", "rome", "oslo"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made.add("rome", None, made.sites_file, None), "keys rotate rome"),
        (lambda made: made.add("a/b", None, made.sites_file, None), "cannot be the name"),
        (lambda made: made.rotate("bern", None, made.sites_file, None), "no site in .* called 'bern'"),
        (lambda made: made.remove("bern", made.sites_file), "no site in .* called 'bern'"),
        (lambda made: made.renew_site("bern", made.authority(None)), "no site in .* called 'bern'"),
        (lambda made: [made.remove(name, made.sites_file) for name in ("berlin", "paris", "rome")], "nobody is left"),
    ],
)
def test_mistakes_with_sites_are_sentences(made, change, words):
    with pytest.raises(FedStrataError, match=words):
        change(made)


def test_a_list_in_another_form_is_left_to_an_editor(made):
    lines = [f'{{ name = "{one.name}", key = "{public_line(one.public_key)}" }}' for one in members(made).members]
    made.sites_file.write_text(f"sites = [{', '.join(lines)}]\n")
    before = made.sites_file.read_text()
    with pytest.raises(FedStrataError, match="with an editor"):
        made.remove("rome", made.sites_file)
    assert made.sites_file.read_text() == before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("removed = 1", "true or false"),
        ("old_key_until = 2030-01-01T00:00:00Z", "both an old_key and"),
        ('old_key = "KEY"\nold_key_until = 2030-01-01', "with its zone"),
        ('old_key = "no key"\nold_key_until = 2030-01-01T00:00:00Z', "no public ECDSA key"),
        ('old_key = "KEY"\nold_key_until = 2030-01-01T00:00:00Z', "same public key"),
    ],
)
def test_what_a_list_says_of_a_site_is_checked(made, line, words):
    line = line.replace("KEY", public_line(members(made).members[0].public_key))
    made.sites_file.write_text(made.sites_file.read_text() + line + "\n")
    with pytest.raises(FedStrataError, match=words):
        members(made)


# Who of a run is still there ------------------------------------------------------------------------------------------


def test_a_roll_keeps_the_numbers_that_the_run_began_with(made):
    begun = members(made).names
    made.remove("berlin", made.sites_file)
    out = Path("runs/one")
    roll = Roll.of(members(made), begun, out)
    assert (roll.names, roll.removed) == (("berlin", "paris", "rome"), ("berlin",))
    assert [len(keys) for keys in roll.keys(NOW)] == [0, 1, 1]
    assert [key is None for key in roll.first_keys] == [True, False, False]
    assert Roll.of(members(made), None, out).names == ("paris", "rome"), "a new run begins without it"
    with pytest.raises(FedStrataError, match="can leave a run, but not join it"):
        Roll.of(members(made), ["berlin", "paris"], out)


# Passphrases ----------------------------------------------------------------------------------------------------------


@pytest.mark.attack(
    "Files with private keys that are under a passphrase are stolen: the authority's, the server's and a site's.",
    "Without the passphrase, or with a wrong one, none of them can be read; a passphrase that is quickly guessed is "
    "refused when it is chosen.",
)
def test_keys_under_a_passphrase_cannot_be_read_without_it(tmp_path):
    with pytest.raises(FedStrataError, match="at least 12"):
        make_keys(tmp_path / "keys", ["localhost"], ["berlin"], passphrase="short")
    make_keys(tmp_path / "keys", ["localhost"], ["berlin"], passphrase=PASSPHRASE)
    for path in (tmp_path / "keys").rglob("*.key"):
        assert path.read_text().startswith("-----BEGIN ENCRYPTED PRIVATE KEY-----")
        with pytest.raises(FedStrataError, match="--passphrase-file"):
            read_private_key(path)
        with pytest.raises(FedStrataError, match="is wrong"):
            read_private_key(path, "something else entirely")
        assert read_private_key(path, PASSPHRASE).key_size in (256, 384)
    server = tmp_path / "keys" / "server"
    with pytest.raises(FedStrataError, match="is wrong"):
        check_pair(server / "server.pem", server / "server.key", "something else entirely")
    check_pair(server / "server.pem", server / "server.key", PASSPHRASE)


def test_a_passphrase_is_changed_and_the_key_stays(folder):
    path = folder / "sites" / "rome" / "site.key"
    key = read_private_key(path).public_key()
    change_passphrase(path, None, PASSPHRASE)
    assert read_private_key(path, PASSPHRASE).public_key() == key
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FedStrataError, match="is wrong"):
        change_passphrase(path, "something else entirely", None)
    change_passphrase(path, PASSPHRASE, None)
    assert read_private_key(path, "not needed").public_key() == key
    assert [one.name for one in path.parent.iterdir() if one.name.startswith(".")] == []


def test_modes_of_secrets_are_checked(folder):
    for path in folder.rglob("*.key"):
        check_mode(path)
        path.chmod(0o640)
        with pytest.raises(FedStrataError, match="chmod 600"):
            check_mode(path)


# What there is --------------------------------------------------------------------------------------------------------


def test_an_inventory_tells_dates_fingerprints_and_remarks(made):
    made.rotate("paris", None, made.sites_file, made.authority(None), timedelta(days=7))
    made.remove("rome", made.sites_file)
    change_passphrase(made.folder / "authority.key", None, PASSPHRASE)
    (made.folder / "server" / "server.key").chmod(0o644)
    found = take_inventory(made.folder, NOW + timedelta(days=340))
    items = {(item.file, item.what, item.whose): item for item in found}
    assert items["server/server.pem", "certificate of the server", "fl.example.org, 10.0.0.7"].remark == "expires soon"
    assert items["server/ca.pem", "certificate of the authority", "FedStrata authority"].remark == ""
    assert items["authority.key", "private key", ""].remark == "under a passphrase"
    assert "chmod 600" in items["server/server.key", "private key", ""].remark
    assert items["server/sites.toml", "public key", "rome"].remark == "removed"
    assert items["server/sites.toml", "old public key", "paris"].remark == "accepted no more"
    own = read_private_key(made.folder / "sites" / "paris" / "site.key").public_key()
    assert items["server/sites.toml", "public key", "paris"].fingerprint == fingerprint(own)
    digest = ssl.PEM_cert_to_DER_cert((made.folder / "server" / "server.pem").read_text())
    assert items["server/server.pem", "certificate of the server", "fl.example.org, 10.0.0.7"].fingerprint == (
        hashlib.sha256(digest).hexdigest()
    )
    for wrong, words in ((made.folder / "nowhere", "no folder"), (made.folder / "sites" / "x", "holds no")):
        if words == "holds no":
            wrong.mkdir()
        with pytest.raises(FedStrataError, match=words):
            take_inventory(wrong, NOW)
