"""The commands for keys: make them, look at them, renew and rotate them, and take sites on and off the list."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.options import Json, add_command, add_group
from fedstrata.cli.passphrases import PassphraseFile, Protect, new_passphrase, passphrase_of
from fedstrata.cli.terminal import new_table, print_json, results
from fedstrata.errors import FedStrataError

if TYPE_CHECKING:
    from fedstrata.deployment.certificates import Authority
    from fedstrata.deployment.keys import KeyFolder
    from fedstrata.deployment.sites_file import PublicKey

PORT = 9092
"""Where a server listens if nothing else is said."""
_DAYS = 365

Days = Annotated[int, typer.Option(metavar="N", min=1, help="For how many days new certificates hold.")]
Keys = Annotated[Path, typer.Option("--keys", help="The folder that 'fedstrata keys' has made.")]
Sites = Annotated[
    Path | None, typer.Option(help="The sites file to change; by default server/sites.toml in the folder of keys.")
]
SiteName = Annotated[str, typer.Argument(metavar="NAME", help="The name of the site.")]
PublicLine = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="LINE",
        help="The public key that the site has made itself, or a file with it; without this, a key is made here.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = add_group(
        app,
        keys,
        (
            "fedstrata keys --host fl.example.org --site berlin --site paris --site rome --out keys",
            "fedstrata keys show keys",
            "fedstrata keys renew keys",
            "fedstrata keys rotate berlin --overlap 7",
            "fedstrata keys remove rome",
        ),
    )
    add_command(group, show, examples=("fedstrata keys show keys",))
    add_command(
        group,
        renew,
        examples=(
            "fedstrata keys renew keys",
            "fedstrata keys renew keys --site berlin",
            "fedstrata keys renew keys --authority",
        ),
    )
    add_command(group, site, examples=("fedstrata keys site berlin --passphrase --out berlin",))
    add_command(group, add, examples=("fedstrata keys add oslo", "fedstrata keys add oslo --key oslo/site.pub"))
    add_command(group, rotate, examples=("fedstrata keys rotate berlin --overlap 7",))
    add_command(group, remove, examples=("fedstrata keys remove rome",))
    add_command(group, passphrase, examples=("fedstrata keys passphrase berlin/site.key",))


def keys(
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address under which sites reach the server; repeatable."),
    ] = None,
    site: Annotated[list[str] | None, typer.Option(help="The name of a site; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="The folder to write; it must not hold anything yet.")] = Path("keys"),
    days: Days = _DAYS,
    passphrase: Protect = False,
    passphrase_file: PassphraseFile = None,
    json: Json = False,
) -> None:
    """Make certificates and keys for a small consortium, and say who gets what.

    One authority signs the certificates of the server and of the sites; each has a key of its own. The commands below
    change a folder of keys later, without a new federation.
    """
    _need_flower()
    from fedstrata.deployment.keys import AUTHORITY_KEY, make_keys

    if not host or not site:
        raise FedStrataError(
            f"A folder of keys needs at least one {'--site' if host else '--host'}; write: "
            "fedstrata keys --host fl.example.org --site berlin --site paris --out keys"
        )
    secret = new_passphrase(passphrase_file) if passphrase or passphrase_file is not None else None
    make_keys(out, host, site, days, secret)
    parts = {"server": out / "server", **{name: out / "sites" / name for name in site}}
    if json:
        print_json(
            {"authority": str(out / AUTHORITY_KEY), "folders": {name: str(path) for name, path in parts.items()}}
        )
        return
    table = new_table("who", "gets this folder", "and starts")
    table.add_row(
        "the server", str(parts["server"]), "fedstrata server EXPERIMENT.TOML --tls server --sites server/sites.toml"
    )
    for name in site:
        command = f"fedstrata client --server {host[0]}:{PORT} --site {name} --keys {name} --data-root FOLDER"
        table.add_row(name, str(parts[name]), command)
    results.print(table)
    _say(
        f"\nSend each folder over a channel that you trust: it holds a private key. Keep {out / AUTHORITY_KEY} to "
        "yourself, where nobody else can read it: it signs new certificates."
    )
    if secret is not None:
        _say(
            "All these keys are under the same passphrase for now; tell it over another channel, and let everybody "
            "take an own one with: fedstrata keys passphrase FILE"
        )


def show(
    folder: Annotated[Path, typer.Argument(help="A folder with keys or certificates.")] = Path("keys"),
    json: Json = False,
) -> None:
    """List certificates with their last day, keys and sites with their fingerprints."""
    _need_flower()
    from fedstrata.deployment.certificates import day
    from fedstrata.deployment.inventory import take_inventory

    items = take_inventory(folder, _now())
    if json:
        print_json([{**vars(item), "ends": None if item.ends is None else item.ends.isoformat()} for item in items])
        return
    for item in items:
        ends = "" if item.ends is None else f"until {day(item.ends)}"
        told = ", ".join(text for text in (item.what, item.whose, ends, item.remark) if text)
        _say(f"{item.file}: {told}" + (f"\n    {item.fingerprint}" if item.fingerprint else ""))


def renew(
    folder: Annotated[Path, typer.Argument(help="The folder that 'fedstrata keys' has made.")] = Path("keys"),
    site: Annotated[
        list[str] | None, typer.Option(help="Renew the certificate of this site instead; may be repeated.")
    ] = None,
    authority: Annotated[
        bool, typer.Option("--authority", help="Renew the certificate of the authority itself, which all sites need.")
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Another name or address of the server; by default it keeps those that it has."),
    ] = None,
    days: Days = _DAYS,
    passphrase_file: PassphraseFile = None,
    json: Json = False,
) -> None:
    """Sign certificates anew, by the same authority and for the same keys: by default the server's.

    A running server takes its renewed certificate in by itself, and its sites need nothing new.
    """
    made, secret = _folder(folder, days, passphrase_file)
    if authority:
        renewed = {"authority": made.renew_authority(secret)}
        further = "Send the new ca.pem, which is no secret, to the server and to every site, and start them again."
    elif site:
        by = made.authority(secret)
        renewed = {name: made.renew_site(name, by) for name in site}
        further = "Send each of them its new site.pem and ca.pem, which are no secrets, and start it again."
    else:
        renewed = {"server": made.renew_server(made.authority(secret), host or ())}
        further = "Put server.pem to the server; one that runs takes it in by itself, and sites need nothing new."
    if json:
        print_json(
            {name: {"ends": one.ends.isoformat(), "fingerprint": one.fingerprint} for name, one in renewed.items()}
        )
        return
    for whose, facts in renewed.items():
        _say(f"The certificate of {whose} holds until {facts.ends:%Y-%m-%d}.")
    _say(further)


def site(
    name: SiteName,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the key; by default one with the site's name.")
    ] = None,
    passphrase: Protect = False,
    passphrase_file: PassphraseFile = None,
    json: Json = False,
) -> None:
    """Make a site's own private key, and print the public line to hand over.

    The private key never leaves the site. Whoever keeps the list adds the line with 'fedstrata keys add' or 'rotate'.
    """
    _need_flower()
    from fedstrata.deployment.keys import SITE_KEY, make_site_key
    from fedstrata.deployment.sites_file import check_name, public_line
    from fedstrata.files import write_atomically

    check_name(name)
    folder = out or Path(name)
    secret = new_passphrase(passphrase_file) if passphrase or passphrase_file is not None else None
    line = public_line(make_site_key(folder, secret))
    public = (folder / SITE_KEY).with_suffix(".pub")
    write_atomically(public, line + "\n")
    if json:
        print_json({"name": name, "key": line, "file": str(public)})
        return
    _say(line)
    _say(f"\nHand over this line, which is also in {public}; keep {folder / SITE_KEY} to yourself.")


def add(
    name: SiteName,
    key: PublicLine = None,
    folder: Keys = Path("keys"),
    sites: Sites = None,
    days: Days = _DAYS,
    passphrase: Protect = False,
    passphrase_file: PassphraseFile = None,
    json: Json = False,
) -> None:
    """Put a site on the list, or put back one that was removed.

    It takes part in runs that begin from then on; one that was removed and is put back can go on in its old run.
    """
    made, by, own, secret = _about_a_site(folder, key, days, passphrase, passphrase_file)
    new = made.add(name, own, sites or made.sites_file, by, secret)
    _tell_of_key(made, name, new, own is None, by is not None, sites or made.sites_file, json)


def rotate(
    name: SiteName,
    key: PublicLine = None,
    overlap: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="For how many days the old key is accepted too.")
    ] = 0,
    folder: Keys = Path("keys"),
    sites: Sites = None,
    days: Days = _DAYS,
    passphrase: Protect = False,
    passphrase_file: PassphraseFile = None,
    json: Json = False,
) -> None:
    """Give a site another key. Its name and its number stay, and so does the run that it takes part in.

    A running server takes the change in by itself.
    """
    made, by, own, secret = _about_a_site(folder, key, days, passphrase, passphrase_file)
    new = made.rotate(name, own, sites or made.sites_file, by, datetime.timedelta(days=overlap), secret)
    _tell_of_key(made, name, new, own is None, by is not None, sites or made.sites_file, json)


def remove(name: SiteName, folder: Keys = Path("keys"), sites: Sites = None, json: Json = False) -> None:
    """Take a site off the list: from then on its key is refused.

    A running server goes on without it within a second or two, as long as the rules allow; one that is started again
    goes on with the others, whose numbers stay.
    """
    _need_flower()
    from fedstrata.deployment.keys import KeyFolder

    made = KeyFolder(folder, _now())
    path = sites or made.sites_file
    made.remove(name, path)
    if json:
        print_json({"name": name, "removed": True, "sites": str(path)})
        return
    _say(f"'{name}' is marked as removed in '{path}'. A running server that reads this file refuses it at once.")


def passphrase(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file with the private key.")],
    none: Annotated[bool, typer.Option("--none", help="Take the protection off instead.")] = False,
    passphrase_file: PassphraseFile = None,
    new_passphrase_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file whose first line is the new passphrase.")
    ] = None,
) -> None:
    """Put a private key under another passphrase; the key itself stays the same."""
    _need_flower()
    from fedstrata.deployment.keys import change_passphrase, read_private_key

    old = passphrase_of(file, passphrase_file)
    read_private_key(file, old)  # a wrong one is told before a new one is asked for
    change_passphrase(file, old, None if none else new_passphrase(new_passphrase_file))
    _say(f"'{file}' is {'without a passphrase now' if none else 'under the new passphrase'}.")


def _folder(folder: Path, days: int, passphrase_file: Path | None) -> tuple[KeyFolder, str | None]:
    """Open a folder of keys, and get the passphrase of its authority."""
    _need_flower()
    from fedstrata.deployment.keys import AUTHORITY_KEY, KeyFolder

    return KeyFolder(folder, _now(), days), passphrase_of(folder / AUTHORITY_KEY, passphrase_file)


def _about_a_site(
    folder: Path, line: str | None, days: int, protect: bool, passphrase_file: Path | None
) -> tuple[KeyFolder, Authority | None, PublicKey | None, str | None]:
    """Gather what a new key on the list needs: the folder, who signs, the site's own key, or a passphrase for one."""
    made, secret = _folder(folder, days, passphrase_file)
    from fedstrata.deployment.keys import AUTHORITY_KEY

    authority = made.authority(secret) if (folder / AUTHORITY_KEY).exists() else None
    own = None if line is None else _public_key(line)
    return made, authority, own, new_passphrase(passphrase_file) if protect and own is None else None


def _public_key(text: str) -> PublicKey:
    from fedstrata.deployment.sites_file import read_public_line
    from fedstrata.files import read_bytes

    given = text if " " in text else read_bytes(Path(text)).decode(errors="replace")
    key = read_public_line(given)
    if key is None:
        raise FedStrataError(f"'{text}' is no public ECDSA key; take the line that 'fedstrata keys site' has printed.")
    return key


def _tell_of_key(
    made: KeyFolder, name: str, key: PublicKey, here: bool, certified: bool, sites: Path, json: bool
) -> None:
    from fedstrata.deployment.sites_file import fingerprint

    folder = made.folder / "sites" / name
    if json:
        told: dict[str, Any] = {"name": name, "fingerprint": fingerprint(key), "sites": str(sites)}
        print_json({**told, "folder": str(folder) if here or certified else None, "certificate": certified})
        return
    _say(f"'{sites}' knows '{name}' by the key {fingerprint(key)} now.")
    if here:
        _say(f"Send it the folder {folder} over a channel that you trust: it holds the private key.")
    elif certified:
        _say(f"Send it site.pem and ca.pem of {folder}, which are no secrets.")
    if not certified:
        _say("There is no authority.key here, so no certificate was made; only --mutual-tls needs one.")


def _say(text: str) -> None:
    results.print(text, soft_wrap=True, markup=False)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _need_flower() -> None:
    from fedstrata.deployment.flower import need_flower

    need_flower()
