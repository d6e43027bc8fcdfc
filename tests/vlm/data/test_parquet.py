"""Parquet files are read as far as rows are asked for, and refused where they unpack to far more than they hold."""

import itertools

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.errors import UserError
from mmrl.hub import tables
from mmrl.hub.tables import check_parquet, read_rows
from robotics.data.tables import read_table
from robotics.flow3d.data.writer import read_group, read_tally


def rows_of(path, count=None):
    return [row.cells for row in itertools.islice(read_rows(str(path), "train", None), count)]


@pytest.fixture
def bomb(tmp_path, monkeypatch):
    """A parquet file of a kilobyte with a text of a megabyte, which is over the limit here."""
    monkeypatch.setattr(tables, "MOST_UNPACKED", 10_000)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a" * 1_000_000]}), path, compression="zstd")
    return path


def test_rows_beyond_those_asked_for_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.Dataset, "from_parquet", None)  # would read all of it
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [str(n) for n in range(4000)]}), path, row_group_size=2000, compression="none")
    start = pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 200] = b"\xff" * 200
    path.write_bytes(content)
    assert rows_of(path, 3) == [{"prompt": "0"}, {"prompt": "1"}, {"prompt": "2"}]
    assert len(rows_of(path, 1000)) == 1000
    with pytest.raises(UserError, match=r"rows\.parquet cannot be read as parquet"):
        rows_of(path)


def test_a_text_that_is_stored_once_for_many_rows_is_read_in_small_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_DECODED", 100_000)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a" * 20_000] * 100}), path)
    # a batch would be 2 MB otherwise
    assert 1 <= tables._rows_at_once(check_parquet(path)) <= 5
    assert rows_of(path) == [{"prompt": "a" * 20_000}] * 100


@pytest.mark.parametrize("columns", [["image"], ["image", "n"], ["n"], ["images", "image", "n"]])
def test_images_stay_in_the_table(columns, tmp_path):
    cells = {"image": [{"bytes": b"%d" % n, "path": None} for n in range(3000)]}
    cells |= {"images": [[b"%d" % n] * (n % 3) for n in range(3000)], "n": list(range(3000))}
    pq.write_table(pa.table({name: cells[name] for name in columns}), tmp_path / "rows.parquet", row_group_size=700)
    rows = rows_of(tmp_path / "rows.parquet")
    assert len(rows) == 3000
    assert {frozenset(row) for row in rows} == {frozenset(columns)}
    for n in (0, 1023, 1024, 2999):
        assert rows[n].get("n", n) == n
        if "image" in columns:
            assert rows[n]["image"].read() == {"bytes": b"%d" % n, "path": None}
        if "images" in columns:
            assert [image.read() for image in rows[n]["images"]] == [b"%d" % n] * (n % 3)


def test_a_file_that_unpacks_to_far_more_than_it_holds_is_refused(bomb):
    sentence = (
        r"its column prompt decompresses to 10\d+ bytes in row group 0; at most 10000 bytes may .* smaller row groups"
    )
    for read in (rows_of, read_table, read_tally, check_parquet, lambda path: read_group(path, 0)):
        with pytest.raises(UserError, match=sentence):
            read(bomb)
    with pytest.raises(UserError, match=sentence):
        rows_of(bomb.parent)


def test_a_large_file_may_unpack_to_many_times_its_size(bomb, monkeypatch):
    monkeypatch.setattr(tables, "MOST_PACKED", 1_000_000)
    assert check_parquet(bomb).num_rows == 1
    assert rows_of(bomb) == [{"prompt": "a" * 1_000_000}]
