"""The script that draws charts is put together once, and kept as long as it is whole."""

from __future__ import annotations

import pytest

from fedstrata.report import document

vl_convert = pytest.importorskip("vl_convert")


@pytest.fixture
def put_together(monkeypatch, tmp_path):
    """Count how often the script is put together, in place of the real one."""
    calls = []
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda *rest: calls.append(rest) or "draw('</script>é');\r\n")
    return calls


def library():
    return document._chart_library.__wrapped__()


def test_it_is_put_together_once(put_together, tmp_path):
    first, second = library(), library()
    assert first == second == "(function () {\ndraw('<\\/script>é');\r\n\n})();"
    assert len(put_together) == 1
    (path,) = (tmp_path / "cache" / "charts").iterdir()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"\xff", lambda content: b""])
def test_one_that_is_damaged_is_put_together_again(put_together, tmp_path, damage):
    first = library()
    (path,) = (tmp_path / "cache" / "charts").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert library() == first
    assert library() == first
    assert len(put_together) == 2


@pytest.mark.parametrize("where", ["off", "file"])
def test_nothing_is_kept_where_nothing_can_be(put_together, tmp_path, monkeypatch, where):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSTRATA_CACHE", "off" if where == "off" else str(tmp_path / "file"))
    assert library() == library()
    assert len(put_together) == 2
