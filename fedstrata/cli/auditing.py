"""What a security officer asks: whether an audit log is whole, and whether a site's policy allows an experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata.cli.options import ExperimentFile, Json, Settings, add_command, read_experiment
from fedstrata.cli.terminal import print_json, results
from fedstrata.errors import FedStrataError


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    audit, policy = (
        typer.Typer(help=words, rich_markup_mode=None)
        for words in (
            "Audit logs of servers and sites: check that nobody has changed one.",
            "Policies of sites: check an experiment before anybody starts.",
        )
    )
    add_command(
        audit,
        verify,
        examples=("fedstrata audit verify runs/consortium", "fedstrata audit verify site-berlin --head 3f0c...9a"),
    )
    add_command(
        policy,
        check,
        ("imports",),
        (
            "fedstrata policy check experiment.toml --policy policy.toml",
            "fedstrata policy check experiment.toml --policy berlin.toml --policy paris.toml --sites sites.toml",
        ),
    )
    app.add_typer(audit, name="audit")
    app.add_typer(policy, name="policy")


def verify(
    path: Annotated[
        Path, typer.Argument(metavar="LOG", help="An audit log, or the folder of a run or of a site's state with one.")
    ],
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="HASH", help="A head that was noted elsewhere: the log must hold it; may be repeated."),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="LOG", help="The log of the other end, with heads of this one; may be repeated."),
    ] = None,
    json: Json = False,
) -> None:
    """Check every line of an audit log; exit with 2 and the first line that is wrong.

    What is missing at the end of a log shows only with --head or --against: both ends print the head of their log when
    they end, and each writes that of the other into its own.
    """
    from fedstrata.deployment.audit import heads_noted, verify

    heads = list(head or ())
    for other in against or ():
        verify(other)
        heads += heads_noted(other, path)
    found = verify(path, heads)
    if json:
        print_json(dataclasses.asdict(found))
        return
    results.print(f"{found.records} records, from {found.first or 'nothing'} to {found.last or 'nothing'}")
    results.print(f"head {found.head}", soft_wrap=True)
    for number in found.torn:
        results.print(f"record {number} tells of a line that was torn, as when a process is killed while it writes")
    for known, later in sorted(found.behind.items(), key=lambda item: item[1])[:1]:
        many = "the head that was noted" if len(found.behind) == 1 else f"all {len(found.behind)} heads that were noted"
        results.print(f"holds {many}; after the last of them, {known}, come {later} records", soft_wrap=True)


def check(
    changes: dict[str, Any],
    policy: Annotated[
        list[Path], typer.Option(metavar="POLICY.TOML", help="A site's policy; may be repeated, for several sites.")
    ],
    experiment_file: ExperimentFile = None,
    sites: Annotated[
        Path | None, typer.Option(help="The server's sites file: how many take part, and by which rules.")
    ] = None,
    settings: Settings = None,
    secure: Annotated[bool, typer.Option("--secure", help="The server is to be started with --secure.")] = False,
    json: Json = False,
) -> None:
    """Tell which sites' policies allow an experiment; exit with 2 where one refuses it, with all its reasons.

    A site that is started with the policy (fedstrata client --policy) refuses by the same rules.
    """
    experiment = read_experiment(experiment_file, settings, changes, quiet=json)
    from fedstrata.deployment.policy import Policy, foreseen, objections, unknown
    from fedstrata.deployment.rules import Rules
    from fedstrata.methods import Method

    number, rules = None, Rules()
    if sites is not None:
        from fedstrata.deployment.flower import need_flower

        need_flower()
        from fedstrata.deployment.sites_file import SitesFile

        file = SitesFile.read(sites)
        number, rules = len(file.members), file.rules
    rules = dataclasses.replace(rules, secure=rules.secure or secure)
    method = Method.make(experiment.method)
    told: list[dict[str, Any]] = [
        {
            "policy": str(one.source),
            "sha256": one.sha256,
            "objections": [
                *objections(one.rules, experiment, method, rules, number),
                *foreseen(one.rules, experiment, method),
            ],
            "open": unknown(one.rules, number),
        }
        for one in map(Policy.read, policy)
    ]
    refusing = [one["policy"] for one in told if one["objections"]]
    if json:
        print_json({"allowed": not refusing, "policies": told})
    else:
        _show_policies(told)
    if refusing:
        raise FedStrataError(f"{len(refusing)} of {len(told)} policies refuse this experiment: {', '.join(refusing)}.")


def _show_policies(told: Sequence[Mapping[str, Any]]) -> None:
    for one in told:
        results.print(f"{one['policy']}: {'refused' if one['objections'] else 'allowed'}", soft_wrap=True, markup=False)
        for line in (*one["objections"], *one["open"]):
            results.print(f"  - {line}", soft_wrap=True, markup=False)
