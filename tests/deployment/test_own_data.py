"""Sites with folders of their own: the server sees no sample, only what the sites declare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from direct_network import DirectNetwork
from PIL import Image
from pyarrow.csv import write_csv
from small_world import EXPERIMENT
from torch import nn

from fedstrata.data import Vocabulary, from_arrays, from_table
from fedstrata.deployment.protocol import REFUSED, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.errors import FedStrataError
from fedstrata.report import read_run, write_report
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import Ingredients
from fedstrata.trained import TrainedModel

NAMES = ["berlin", "paris", "rome"]
OWN = EXPERIMENT.with_changes({"data": "image_folder(size=8)", "method": "fedbn", "model": "cnn", "rounds": 2})


def fill(folder: Path, classes: tuple[str, ...], images: int, seed: int) -> Path:
    chance = np.random.default_rng(seed)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for image in range(images):
            pixels = chance.integers(0, 100, (8, 8, 3)) + 150 * (number == 1)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{image}.png")
    return folder


class FolderNetwork(DirectNetwork):
    """Sites that each hold a folder."""

    def __init__(self, folder: Path, folders: list[Path]) -> None:
        self.folders = folders
        super().__init__(folder, len(folders))

    def start(self, number: int) -> Site:
        data = SiteData(data_root=str(self.folders[number]))
        return Site(self.folder / f"site-{number}", data, self.lines[number].append)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [fill(tmp_path / name, ("ill", "well"), 8 + 4 * number, number) for number, name in enumerate(NAMES)]


def test_a_run_over_folders_that_the_server_never_sees(folders, tmp_path):
    deployment = Deployment(OWN, NAMES, tmp_path / "run")
    assert "not on this machine" in deployment.describe()["data"]
    network = FolderNetwork(tmp_path / "state", folders)
    summary = deployment.run(network)
    assert summary["final"]["client_after.accuracy.mean"] >= 0
    assert "global.accuracy" not in summary["final"]
    data = RunFolder.open(tmp_path / "run").data()
    assert data["sizes"] == [12, 18, 24]
    assert data["test_sizes"] == [4, 6, 8]
    assert data["label_counts"] == [[6, 6], [9, 9], [12, 12]]
    assert data["class_names"] == ["ill", "well"]
    for path in (tmp_path / "run").rglob("*"):
        assert path.suffix != ".png"
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "fedstrata server --tls" in page
    assert "fedstrata run " not in page, "the server has no data to run anything with"
    assert read_run(tmp_path / "run").finished
    for number in range(3):
        assert list((tmp_path / "state" / f"site-{number}").glob("*/model/model.safetensors"))


def test_a_site_with_other_classes_is_refused_by_name(folders, tmp_path):
    (folders[1] / "well").rename(folders[1] / "dead")
    lines: list[str] = []
    deployment = Deployment(OWN, NAMES, tmp_path / "run", Rules(max_refusals=1))
    deployment.run(FolderNetwork(tmp_path / "state", folders), log=lines.append)
    assert any("paris" in line and "dead" in line for line in lines)
    assert RunFolder.open(tmp_path / "run").data()["sizes"] == [12, 1, 24]


def test_the_server_cannot_name_a_folder_of_the_site(folders, tmp_path):
    experiment = replace(OWN, data=f"image_folder(path='{folders[0]}', size=8)")
    facts = {"experiment": experiment.to_mapping(), "number": 0, "sites": 3, "session": "one", "committed": 0}
    answer = Site(tmp_path / "state", SiteData()).answer(Request("hello", "run", facts=facts))
    assert answer.status == REFUSED
    assert "only the site itself" in answer.reason


@pytest.mark.parametrize("where", ["path=a.csv", "encoding=/etc/columns.json", "test='../other.csv'", "test=~x.csv"])
def test_the_server_cannot_name_a_table_of_the_site(where, tmp_path):
    with pytest.raises(FedStrataError, match="only the site itself"):
        SiteData(data_root=str(tmp_path)).prepare(replace(OWN, data=f"table({where})"), 0, 3)


def test_sites_with_tables_encode_alike_by_what_they_agreed_on(tmp_path):
    rows = {"age": list(range(24)), "sex": ["f", "m", "x"] * 8, "outcome": ["ill", "well"] * 12}
    whole = from_table(rows, label="outcome").table
    folders = [tmp_path / name for name in NAMES]
    for number, folder in enumerate(folders):
        folder.mkdir()
        own = {name: values[8 * number : 8 * number + 8 - number] for name, values in rows.items()}
        write_csv(pa.table(own), folder / "patients.csv")
        whole.write(folder / "columns.json")
    data = "table(label=outcome, encoding=columns.json)"
    experiment = OWN.with_changes({"data": data, "model": "mlp:4", "method": "fedavg"})
    deployment = Deployment(experiment, NAMES, tmp_path / "run")
    deployment.run(FolderNetwork(tmp_path / "state", folders))
    told = RunFolder.open(tmp_path / "run").data()
    assert told["input_shape"] == [4]  # the age, and three sexes, of which no site need have all
    assert told["sizes"] == [6, 5, 4]


def test_sites_with_tokens_are_told_from_sites_with_quantities(tmp_path):
    class TokenNetwork(DirectNetwork):
        """Sites with whole numbers, but for one, whose numbers are quantities."""

        def start(self, number: int) -> Site:
            tokens = torch.randint(0, 30, (12, 5), generator=torch.Generator().manual_seed(number))
            inputs = tokens.float() if number == odd else tokens
            own = Ingredients(dataset=from_arrays(inputs, ["ill", "well"] * 6), model=model)
            return Site(self.folder / f"site-{number}", SiteData(ingredients=own), self.lines[number].append)

    def model() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(30, 4, padding_idx=0), nn.Linear(4, 2))

    for odd in (None, 2):
        lines: list[str] = []
        out = tmp_path / f"run-{odd}"
        experiment, own = OWN.with_changes({"method": "fedavg"}), Ingredients(model=model)
        deployment = Deployment(experiment, NAMES, out, Rules(min_sites=2, max_refusals=1), ingredients=own)
        deployment.run(TokenNetwork(tmp_path / f"state-{odd}", 3), log=lines.append)
        assert RunFolder.open(out).data()["whole_numbers"] is True
        assert any("rome" in line and "cannot take inputs" in line for line in lines) == (odd is not None)


def test_sites_with_texts_need_one_vocabulary(tmp_path):
    vocabularies = [Vocabulary.build(texts, 9, 4) for texts in (["a b"], ["a b"], ["a c"])]

    class TextNetwork(DirectNetwork):
        """Sites with texts, one of which has a vocabulary of its own."""

        def start(self, number: int) -> Site:
            texts = vocabularies[number].encode(["a b", "b a"] * 6)
            dataset = replace(from_arrays(texts, ["ill", "well"] * 6), vocabulary=vocabularies[number])
            own = Ingredients(dataset=dataset, model=model)
            return Site(self.folder / f"site-{number}", SiteData(ingredients=own), self.lines[number].append)

    def model() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(9, 4, padding_idx=0), nn.Linear(4, 2))

    lines: list[str] = []
    experiment, own = OWN.with_changes({"method": "fedavg"}), Ingredients(model=model)
    deployment = Deployment(experiment, NAMES, tmp_path / "run", Rules(min_sites=2, max_refusals=1), ingredients=own)
    deployment.run(TextNetwork(tmp_path / "state", 3), log=lines.append)
    [refusal] = [line for line in lines if "refused" in line]
    assert "rome" in refusal
    assert "its texts have another vocabulary than those of the other sites" in refusal
    card = TrainedModel.load(next((tmp_path / "state").rglob("model.json")).parent, model).card
    assert card.vocabulary == vocabularies[0].to_mapping()


def test_a_site_may_choose_its_own_dataset(folders, tmp_path):
    data = SiteData(data=f"image_folder(path='{folders[0]}', size=8)")
    ready = data.prepare(OWN, 0, 3)
    assert ready.dataset.input_shape == (3, 8, 8)
    with pytest.raises(FedStrataError, match="are in none of"):
        replace(data, data=f"image_folder(path='{tmp_path / 'nothing'}')").prepare(OWN, 0, 3)
