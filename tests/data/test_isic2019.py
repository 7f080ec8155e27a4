"""ISIC 2019 by centre, on small files in the true formats."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedstrata.data import Dataset, datasets, partitions
from fedstrata.data.datasets.isic2019 import CENTRES, prepared, shades_of_grey
from fedstrata.errors import FedStrataError
from fedstrata.testing import check_dataset

COLUMNS = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC", "UNK")
SOURCES = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
# image, diagnosis, lesion, source in the metadata of HAM10000
PHOTOGRAPHS = [
    ("ISIC_0000000", "NV", None, None),
    *(
        (f"ISIC_00{number}", "MEL" if number % 2 else "NV", f"HAM_000{number}", SOURCES[number % 4])
        for number in range(24300, 24316)
    ),
    *((f"ISIC_005{number}", "BCC", f"BCN_000{number}", None) for number in range(3000, 3007)),
    ("ISIC_0053007", "SCC", "BCN_0003007", None),
    ("ISIC_0011402_downsampled", "BKL", "MSK4_0011169", None),
    ("ISIC_0011403", "BKL", "MSK4_0011170", None),
    ("ISIC_0011404", "UNK", "MSK4_0011171", None),
]


@pytest.fixture(autouse=True)
def _no_other_roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "isic2019"
    (folder / "ISIC_2019_Training_Input").mkdir(parents=True)
    truth, metadata = [",".join(("image", *COLUMNS))], ["image,age_approx,anatom_site_general,lesion_id,sex"]
    ham = ["lesion_id,image_id,dx,dx_type,age,sex,localization,dataset"]
    for image, diagnosis, lesion, source in PHOTOGRAPHS:
        truth.append(",".join((image, *("1.0" if name == diagnosis else "0.0" for name in COLUMNS))))
        metadata.append(f"{image},55.0,anterior torso,{lesion or ''},female")
        if source is not None:
            ham.append(f"{lesion},{image},nv,histo,55.0,female,back,{source}")
        buffer = BytesIO()
        Image.new("RGB", (20, 15), (100, 100, 100)).save(buffer, "JPEG")
        (folder / "ISIC_2019_Training_Input" / f"{image}.jpg").write_bytes(buffer.getvalue())
    (folder / "ISIC_2019_Training_GroundTruth.csv").write_text("\n".join(truth) + "\n")
    (folder / "ISIC_2019_Training_Metadata.csv").write_text("\n".join(metadata) + "\n")
    (folder / "HAM10000_metadata").write_text("\n".join(ham) + "\n")
    return folder


def load(root: Path, **parameters: int) -> Dataset:
    text = ", ".join(f"{name}={value}" for name, value in {"size": 8, "shorter": 10, **parameters}.items())
    return datasets.make(f"isic2019({text})").load(root)


def test_centres_are_those_of_flamby(place: Path) -> None:
    dataset = load(place.parent)
    assert dataset.inputs.shape == (26, 3, 8, 8)
    sites, counts = np.unique(dataset.sites, return_counts=True)
    assert dict(zip(sites, counts, strict=True)) == dict(zip(CENTRES, (8, 4, 4, 4, 4, 2), strict=True))
    assert dataset.class_names == ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    assert dataset.labels[:8].tolist() == [2] * 7 + [7]
    # A fifth of seven photographs, rounded, is one; single ones stay to train on.
    assert dataset.test[0] == 3
    assert np.isin([7], dataset.train).all()
    split = partitions.make("natural").split(dataset, 6)
    assert (split.sizes + split.test_sizes).tolist() == [8, 4, 4, 4, 4, 2]
    check_dataset(dataset)


def test_what_player_fl_takes(place: Path) -> None:
    dataset = load(place.parent, classes=4, centres=4, most=3)
    assert dataset.class_names == ("BCC", "BKL", "MEL", "NV")
    assert np.unique(dataset.sites).tolist() == list(CENTRES[:4])
    assert np.unique(dataset.sites, return_counts=True)[1].tolist() == [3, 3, 3, 3]
    assert dataset.labels[:3].tolist() == [0, 0, 0]


def test_flambys_own_table_of_centres_will_do(place: Path) -> None:
    before = load(place.parent)
    lines = ["image,age_approx,anatom_site_general,sex,dataset"]
    for image, _, lesion, source in PHOTOGRAPHS:
        if lesion is not None:
            lines.append(f"{image},55.0,anterior torso,female,{lesion[:4]}{source or 'nan'}")
    (place / "ISIC_2019_Training_Metadata_FL.csv").write_text("\n".join(lines))
    (place / "ISIC_2019_Training_Metadata.csv").unlink()
    (place / "HAM10000_metadata").unlink()
    after = load(place.parent)
    assert after.sites is not None
    assert np.array_equal(after.sites, before.sites)
    assert np.array_equal(after.labels, before.labels)


def test_colours_by_hand() -> None:
    """Two pixels: the norms of the channels are (mean of p^6)^(1/6), and grey light changes nothing."""
    pixels = np.array([[[200, 100, 50], [200, 100, 50]]], dtype=np.uint8)
    # (200, 100, 50) has the length 229.1; each channel becomes 229.1 / sqrt(3) = 132.3.
    assert shades_of_grey(pixels).tolist() == [[[132, 132, 132], [132, 132, 132]]]
    uneven = np.array([[[64, 0, 0], [0, 0, 0]]], dtype=np.uint8)
    norm = (64**6 / 2) ** (1 / 6)
    factor = np.sqrt(norm**2 + 2) / (np.sqrt(3) * norm)
    assert shades_of_grey(uneven)[0, 0].tolist() == [int(64 * factor), 0, 0]
    bright = np.array([[[255, 10, 10]] + [[10, 10, 10]] * 99], dtype=np.uint8)
    assert shades_of_grey(bright)[0, 1].tolist()[1] > 10
    assert shades_of_grey(np.array([[[10, 200, 200], [255, 255, 255]]], dtype=np.uint8)).max() == 255


def test_the_norm_of_the_colours_is_the_sixth() -> None:
    """On pixels of different shades the norm decides: with the second, 200 would become 168."""
    graded = np.array([[[10, 100, 50], [200, 100, 150]]], dtype=np.uint8)
    # Red 200 / 2^(1/6) = 178.18, green 100, blue 150 ((1 + 3^-6) / 2)^(1/6) = 133.67: together 244.16, and
    # 244.16 / sqrt(3) = 140.97. Red is multiplied by 0.7912, green by 1.4097, blue by 1.0546; what is beyond the
    # point is cut off.
    assert shades_of_grey(graded).tolist() == [[[7, 140, 52], [158, 140, 158]]]


def test_images_are_scaled_by_their_shorter_side_and_cut() -> None:
    wide = Image.new("RGB", (40, 20))
    wide.paste((255, 255, 255), (10, 0, 30, 20))  # the middle half is white
    cut = np.asarray(prepared(wide, shorter=10, size=8, correct=False))
    assert cut.shape == (8, 8, 3)
    assert cut.min() > 250
    ready = np.asarray(prepared(Image.new("RGB", (224, 300), (9, 8, 7)), shorter=224, size=200, correct=False))
    assert ready.shape == (200, 200, 3)
    assert ready[0, 0].tolist() == [9, 8, 7]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("nothing", "ISIC_2019_Training_GroundTruth.csv, ISIC_2019_Training_Metadata.csv"),
        ("ham", "HAM10000_metadata' is missing, without which the centres"),
        ("photograph", "ISIC_0053000.jpg' is in none of the folders"),
        ("another", "ISIC_0053001.jpg' leads nowhere"),
        ("centre", "'XYZ' is none of the centres"),
        ("source", "'HAM_mars' is none of the centres"),
        ("several", "row 1 has several diagnoses"),
        ("column", "has no column 'SCC'"),
        ("path", "row 0 of its column 'image' is no plain name"),
    ],
)
def test_what_is_missing_or_damaged_gets_one_sentence(place: Path, what: str, sentence: str) -> None:
    truth, ham = place / "ISIC_2019_Training_GroundTruth.csv", place / "HAM10000_metadata"
    metadata = place / "ISIC_2019_Training_Metadata.csv"
    changes = {
        "nothing": truth.unlink,
        "ham": ham.unlink,
        "photograph": (place / "ISIC_2019_Training_Input" / "ISIC_0053000.jpg").unlink,
        "another": (place / "ISIC_2019_Training_Input" / "ISIC_0053001.jpg").unlink,
        "centre": lambda: metadata.write_text(metadata.read_text().replace("BCN_0003000", "XYZ_0003000")),
        "source": lambda: ham.write_text(ham.read_text().replace("rosendahl", "mars")),
        "several": lambda: truth.write_text(truth.read_text().replace("24300,0.0", "24300,1.0")),
        "column": lambda: truth.write_text(truth.read_text().replace("SCC", "other")),
        "path": lambda: truth.write_text(truth.read_text().replace("ISIC_0000000", "../ISIC_0000000")),
    }
    changes[what]()
    with pytest.raises(FedStrataError, match=sentence):
        load(place.parent)


def test_no_more_is_cut_out_than_there_is() -> None:
    with pytest.raises(FedStrataError, match="300 pixels cannot be cut out of images whose shorter side has 224"):
        datasets.make("isic2019(size=300)")
