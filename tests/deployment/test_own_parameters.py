"""A server names no place on a site's machine and makes it fetch nothing: that is the site's own to set."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstrata import files
from fedstrata.data import datasets, partitions, transforms
from fedstrata.deployment.own_parameters import COMPONENTS, local_parameters, with_own_parameters
from fedstrata.deployment.protocol import OK, REFUSED, Request
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.losses import losses
from fedstrata.methods import Part, methods
from fedstrata.models import build_model, models
from fedstrata.optimisers import optimisers
from fedstrata.schedules import schedules
from fedstrata.scores import metrics
from fedstrata.spec import Registry, Spec, parameter

REGISTRIES: tuple[Registry[Any], ...] = (
    datasets, partitions, transforms, models, methods, optimisers, schedules, losses, metrics,
)  # fmt: skip
SMALL_VIT = "vit(patch=4, width=8, depth=1, heads=2, mlp_ratio=1{})"
OTHER_MEANING = {
    ("cifar10", "shards"), ("cifar100", "shards"), ("image_folder", "test_fraction"), ("table", "site"),
}  # fmt: skip
"""Parameters that speak of files and name none."""
_TELLING = re.compile(r"\b(path|folder|directory|files?|url|hub|fetch\w*|download\w*)\b", re.IGNORECASE)
_WATCHED = ("open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo", "socket.bind")
_watching: list[list[tuple[str, str]]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in _WATCHED:
        _watching[-1].append((event, str(arguments[0])))


sys.addaudithook(_hear)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Hear of every file that is opened or looked at, and of every connection."""
    heard: list[tuple[str, str]] = []
    look = os.stat

    def stat(path: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        heard.append(("stat", str(path)))
        return look(path, *arguments, **keywords)

    monkeypatch.setattr(os, "stat", stat)
    _watching.append(heard)
    yield heard
    _watching.pop()


@dataclasses.dataclass(frozen=True)
class Warm(Part):
    """A part of other people, which goes on from another run."""

    run: str | None = parameter(None, "The run to begin from.")


@pytest.fixture
def _warm() -> Iterator[None]:
    methods.register("warm")(Warm)
    yield
    methods.put("warm", None)


def greeted(folder: Path, own: SiteData, **changes: Any) -> Any:
    experiment = Experiment(clients=2, rounds=1, transforms="none").with_changes(changes)
    facts = {"experiment": experiment.to_mapping(), "number": 0, "sites": 2, "session": "one", "committed": 0}
    return Site(folder, own).answer(Request("hello", "run", facts=facts))


ATTACKS = [
    {"model": "vit(weights='{trap}')"},
    {"model": "dino-vit-s16(weights='{trap}')"},
    {"model": "dino-vit-s16(weights='somebody/else')"},
    {"model": "dino-vit-s16(download=true)"},
    {"data": "image_folder(path='{trap}')"},
    {"data": "table(path='{trap}', label=ill)"},
    {"data": "table(label=ill, encoding='{trap}/columns.json')"},
    {"data": "table(label=ill, test='..')"},
    {"method": "warm(run='{trap}')"},
]


@pytest.mark.attack(
    "A server's experiment names folders of a site (weights, runs, data, tables), or lets it download weights.",
    "The site refuses with a sentence; it neither opens nor looks at the place, and nothing is connected to.",
)
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: str(next(iter(attack.values()))))
def test_a_server_names_no_place_on_a_sites_machine(attack, seen, tmp_path):
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "columns.json").write_text("{}")
    seen.clear()
    changes = {key: text.format(trap=trap) for key, text in attack.items()}
    answer = greeted(tmp_path / "state", SiteData(data_root=str(tmp_path)), **changes)
    assert answer.status == REFUSED
    assert "only the site itself" in answer.reason
    assert not [place for _, place in seen if "trap" in place]
    assert not [event for event, _ in seen if event.startswith("socket")]


def test_the_watch_sees_what_is_opened_and_connected(seen, tmp_path):
    (tmp_path / "trap").write_text("x")
    (tmp_path / "trap").is_file()
    with socket.socket() as one:
        one.settimeout(0.2)
        one.connect_ex(("127.0.0.1", 9))
    files.read_bytes(tmp_path / "trap")
    assert {"stat", "open", "socket.connect"} <= {event for event, place in seen}


def every_parameter() -> Iterator[tuple[type[Spec], dataclasses.Field[Any]]]:
    for registry in REGISTRIES:
        for name in registry.names():
            component = registry.get(name)
            for field in dataclasses.fields(component):
                yield component, field


def test_whatever_speaks_of_files_or_fetching_is_marked():
    marked = {(one.name, field.name) for one, field in every_parameter() if one.is_local(field)}
    telling = {
        (one.name, field.name)
        for one, field in every_parameter()
        if _TELLING.search(f"{field.name.replace('_', ' ')}: {field.metadata.get('doc', '')}")
    }
    assert telling - marked == OTHER_MEANING
    assert marked == {
        ("vit", "weights"), ("dino-vit-s16", "weights"), ("dino-vit-s16", "download"), ("image_folder", "path"),
        ("table", "path"), ("table", "test"), ("table", "encoding"),
        ("hub", "repository"), ("hub", "vocabulary"), ("hub", "download"), ("ag_news", "vocabulary"),
        ("sogou_news", "vocabulary"), ("amazon_reviews", "vocabulary"), ("sentiment140", "vocabulary"),
        ("mimic_notes", "vocabulary"), ("transformer", "embeddings"), ("fraction", "of"), ("timm", "weights"),
        ("fedlws_vit", "weights"), ("resnet20", "weights"),
    }  # fmt: skip


def test_every_text_of_an_experiment_that_names_components_is_looked_at():
    kept_from_components = {
        "data_root", "last_batch", "statistics", "upload_values", "download_values", "engine", "device", "precision",
    }  # fmt: skip
    texts = {field.name for field in dataclasses.fields(Experiment) if "str" in str(field.type)} - {"imports"}
    assert texts == COMPONENTS.keys() | kept_from_components


@pytest.mark.parametrize(
    "harmless",
    [
        {"model": "dino-vit-s16(weights=none)"},
        {"model": "dino-vit-s16"},
        {"data": "table(label=ill, encoding=columns.json, test=held_out.csv)"},
        {"data": "image_folder(size=8)", "loss": "focal(weights=balanced)", "metrics": "f1+auc"},
        {"data": "python:arrays", "model": "python:Net"},
    ],
)
def test_what_names_no_place_may_come_from_a_server(harmless):
    assert local_parameters(Experiment(**harmless)) == {}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = build_model(SMALL_VIT.format(""), (1, 8, 8), 10, seed=7)
    path = tmp_path / "vit.safetensors"
    path.write_bytes(files.to_safetensors(model.state_dict()))
    return path


def test_a_sites_operator_sets_it(weights, tmp_path):
    """The site's own file is read, and the experiment stays the server's in all other ways."""
    server = Experiment(model=SMALL_VIT.format(", weights='/srv/vit.safetensors'"), clients=2, rounds=1)
    own = SiteData(data="digits", own={"model": SMALL_VIT.format(f", weights='{weights}'")})
    ready = own.prepare(server, 0, 2)
    expected = files.from_safetensors(weights.read_bytes(), weights)
    assert all(torch.equal(ready.setting.initial[name], tensor) for name, tensor in expected.items())
    answer = greeted(tmp_path / "state", own, model=server.model)
    assert answer.status == OK, answer.reason


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"model": "vit(width=12, weights='a')"}, "a site can set only paths"),
        ({"model": "mlp"}, "a site can set only paths"),
        ({"method": "fedbn"}, "a site can set only paths"),
        ({"rounds": "3"}, "key that a site can set"),
    ],
)
def test_a_sites_operator_sets_nothing_else(own, words):
    with pytest.raises(FedStrataError, match=words):
        with_own_parameters(Experiment(model="vit(weights='b')"), own)


def test_a_rehearsal_gives_its_sites_its_own_paths(weights, tmp_path):
    pytest.importorskip("flwr")
    from fedstrata.deployment.local import _own_data

    experiment = Experiment(model=f"vit(weights='{weights}')", data=f"image_folder(path='{tmp_path}')")
    arguments = list(_own_data(Deployment(experiment, ["a", "b"], tmp_path / "run")))
    assert arguments[2:] == ["--set", f"data={experiment.data}", "--set", f"model={experiment.model}"]


def test_a_name_that_speaks_for_itself_is_local_unless_it_says_otherwise():
    @dataclasses.dataclass(frozen=True)
    class Own(Spec):
        path: str | None = parameter(None, "Where.")
        run: int = parameter(1, "How many.", local=False)
        other: str | None = parameter(None, "Which.")

    assert Own(path="/etc", run=2, other="x").local_values() == {"path": "/etc"}
    assert Own().local_values() == {}
