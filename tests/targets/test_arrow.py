"""Saved targets: what is in the files, who can read them, and what damage is noticed."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_dist.targets import Dirichlet, LocalTargets, arrow

N, K = 41, 7
PRIOR = Dirichlet(K, 0.9, 5.0, 0.1)


def trained(seed=0, num_samples=N, prior=PRIOR):
    store = LocalTargets(num_samples, prior)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        index = torch.randperm(num_samples, generator=generator)[: num_samples // 2 + 1]
        probs = torch.randn(len(index), prior.num_classes, generator=generator)
        store.update(index, torch.softmax(5 * probs, -1))
    return store


def same(a, b):
    return torch.equal(a._rows.view(torch.int16), b._rows.view(torch.int16)) and torch.equal(
        a._visits.view(torch.int16), b._visits.view(torch.int16)
    )


def save_as(folder, store, world_size):
    """Write the store's rows as world_size ranks would, each with some part of them."""
    ranks = []
    owner = np.random.default_rng(0).integers(0, world_size, store.num_samples)
    for rank in range(world_size):
        samples = np.flatnonzero(owner == rank)
        rows, visits = store._rows.numpy()[samples], store._visits.numpy()[samples]
        chunks = [
            (samples[i : i + 4], rows[i : i + 4], visits[i : i + 4])
            for i in range(0, len(samples), 4)
        ]
        part = arrow.Snapshot(rank, world_size, store.num_samples, store.prior, chunks)
        saved = part.write(folder)
        ranks.append((saved.rows, saved.size, saved.crc32))
    arrow.write_manifest(folder, store.num_samples, store.prior, ranks)


def test_round_trip(tmp_path):
    store, other = trained(), LocalTargets(N, PRIOR)
    store.save(tmp_path / "new" / "folder")
    other.load(tmp_path / "new" / "folder")
    assert same(store, other)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "targets-00000-of-00001.arrow",
        "targets.json",
    ]


def test_saved_targets_are_not_overwritten(tmp_path):
    """A kill in the middle of it would leave neither the old nor the new."""
    trained().save(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds saved targets already"):
        trained(1).save(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_round_trip_of_many_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "CHUNK_BYTES", 100)
    store, other = trained(), trained(1)
    store.save(tmp_path)
    other.load(tmp_path)
    assert same(store, other)


@pytest.mark.parametrize("world_size", [2, 5])
def test_reads_what_several_ranks_saved(tmp_path, world_size):
    store, other = trained(), trained(1)
    save_as(tmp_path, store, world_size)
    other.load(tmp_path)
    assert same(store, other)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 60])
def test_ranks_share_the_rows_as_they_lie(tmp_path, world_size):
    store = trained()
    save_as(tmp_path, store, 3)
    files, _ = arrow.files_of(tmp_path, N, PRIOR)
    shares = arrow.shares(files, world_size)
    assert sum(map(len, shares)) == N and max(map(len, shares)) == -(-N // world_size)
    read = []
    for share in shares:
        part = arrow.Part(files, share)
        own = [np.zeros(0, np.int64), *(samples for samples, _, _ in part)]
        assert (np.concatenate(own) == part.samples(N)).all() and len(part.samples(N)) == len(share)
        for samples, coded, visits in part:
            assert (coded.view(np.int16) == store._rows.view(torch.int16).numpy()[samples]).all()
            assert (visits == store._visits.numpy()[samples]).all()
        read += part.samples(N).tolist()
    assert sorted(read) == list(range(N))


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([14, 13, 14], [14, 13, 14]),  # its own file
        ([14, 14, 13], [14, 14, 13]),
        ([15, 13, 13], [14, 14, 13]),  # too many for one: there is room for ⌈41/3⌉
        ([21, 20], [14, 14, 13]),
        ([41, 0, 0, 0], [14, 14, 13]),
    ],
)
def test_a_file_each_where_ranks_are_as_many(rows, lengths):
    files = [(None, arrow.Saved("", count, 0, 0)) for count in rows]
    assert [len(share) for share in arrow.shares(files, 3)] == lengths


def test_a_file_with_fewer_rows_than_its_manifest_says(tmp_path):
    save_as(tmp_path, trained(), 2)
    files, _ = arrow.files_of(tmp_path, N, PRIOR)
    (path, saved), other = files
    more = [(path, replace(saved, rows=saved.rows + 1)), other]
    with pytest.raises(ValueError, match=r"00000-of-00002.arrow has fewer rows than targ"):
        arrow.Part(more, range(N)).samples(N)


def test_anyone_with_pyarrow_can_read_it(tmp_path):
    """Only what the file itself says is used here: columns, metadata, the formulas in them."""
    store = trained()
    store.save(tmp_path)
    (path,) = tmp_path.glob("*.arrow")
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    meta = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert table.column_names == ["index", "visits", "evidence"]
    assert meta["evidence"].endswith("m = v / 2**15 if v >= 0 else 1 + v / 2**15")
    assert meta["format"] == "dps_dist targets, version 1"

    prior = {name: json.loads(meta[name]) for name in ("gamma", "c", "epsilon", "num_classes")}
    decode = eval(f"lambda v: {meta['evidence'].split(': m = ')[1]}")
    target = meta["target"].split("y = ")[1].split(", B =")[0]
    label = 2
    for row in table.slice(0, 10).to_pylist():
        known = {**prior, "t": row["visits"]}
        known["m"] = np.array([decode(float(v)) for v in row["evidence"]])
        known["alpha0"] = np.full(K, prior["epsilon"])
        known["alpha0"][label] = prior["c"]
        known["A0"] = prior["c"] + (prior["num_classes"] - 1) * prior["epsilon"]
        known["B"] = (1 - prior["gamma"] ** known["t"]) / (1 - prior["gamma"])
        y = eval(target, known)
        read = store.read(torch.tensor([row["index"]]), torch.tensor([label]))[0]
        np.testing.assert_allclose(y, read.numpy(), rtol=1e-5, atol=1e-8)


def test_a_snapshot_is_the_store_as_it_was(tmp_path):
    store, before, other = trained(), trained(), LocalTargets(N, PRIOR)
    snapshot = store.snapshot()
    store.update(store.held(), torch.full((N, K), 1 / K))
    saved = snapshot.write(tmp_path)
    arrow.write_manifest(tmp_path, N, PRIOR, [(saved.rows, saved.size, saved.crc32)])
    other.load(tmp_path)
    assert same(other, before) and not same(other, store)
    assert saved.rows == N and (tmp_path / saved.name).stat().st_size == saved.size


@pytest.mark.parametrize(("num_classes", "kind"), [(7, pa.uint8()), (300, pa.uint16())])
@pytest.mark.parametrize("give", [torch.from_numpy, np.asarray])
def test_labels_go_with_the_rows(tmp_path, monkeypatch, num_classes, kind, give):
    monkeypatch.setattr(arrow, "CHUNK_BYTES", 200)
    prior = Dirichlet(num_classes, 0.9, 5.0)
    store, other = trained(prior=prior), LocalTargets(N, prior)
    labels = np.random.default_rng(0).integers(0, num_classes, N)
    store.save(tmp_path, labels=give(labels))
    other.load(tmp_path)
    assert same(store, other)
    (path,) = tmp_path.glob("*.arrow")
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    assert table.column_names == ["index", "visits", "evidence", "label"]
    assert table["label"].type == kind and b"label" in table.schema.metadata
    assert table["label"].to_pylist() == labels[table["index"].to_numpy()].tolist()


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (torch.zeros(N - 1, dtype=torch.int64), r"labels is int64 of shape \[40\]: give"),
        (torch.zeros(N), r"labels is float32 of shape \[41\]: give integers \[41\]"),
        (torch.arange(N) % 8, "the label of sample 7 is 7: give 0 to 6"),
        (torch.arange(N) - 1, "the label of sample 0 is -1"),
    ],
)
def test_labels_that_do_not_fit_are_refused(tmp_path, labels, sentence):
    with pytest.raises(ValueError, match=sentence):
        trained().save(tmp_path / "new", labels=labels)
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_as(folder, trained(), 2)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(folder, match):
    store = trained(7)
    before = store._rows.clone(), store._visits.clone()
    with pytest.raises(ValueError, match=match):
        store.load(folder)
    assert torch.equal(before[0], store._rows) and torch.equal(before[1], store._visits)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_noticed_by_file(saved, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flipped")
    name = data.draw(st.sampled_from(sorted(saved)))
    place = data.draw(st.integers(0, len(saved[name]) - 1))
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(saved[name])
    damaged[place] ^= 1 << bit
    for other, content in saved.items():
        (folder / other).write_bytes(damaged if other == name else content)
    refused(folder, name)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_truncated_file_is_noticed_by_name(saved, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("truncated")
    name = data.draw(st.sampled_from(sorted(saved)))
    length = data.draw(
        st.integers(0, len(saved[name]) - 2)
    )  # the last byte of the JSON is a newline
    for other, content in saved.items():
        (folder / other).write_bytes(content[:length] if other == name else content)
    refused(folder, name)


@pytest.mark.parametrize("name", ["targets-00001-of-00002.arrow", "targets.json"])
def test_a_missing_file_is_named(saved, tmp_path, name):
    for other, content in saved.items():
        if other != name:
            (tmp_path / other).write_bytes(content)
    refused(tmp_path, f"{name} is missing")


@pytest.mark.parametrize("content", [b"", b"[5]", b'["a"]', b"{}", b"null"])
def test_a_manifest_of_something_else_is_refused(saved, tmp_path, content):
    for name, bytes_of in saved.items():
        (tmp_path / name).write_bytes(content if name == "targets.json" else bytes_of)
    refused(tmp_path, "targets.json is damaged")


def test_leftovers_of_another_save_are_not_read(saved, tmp_path):
    for name, content in saved.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "targets-00002-of-00003.arrow").write_bytes(b"of a run that died")
    store = LocalTargets(N, PRIOR)
    store.load(tmp_path)
    assert same(store, trained())


def test_an_incomplete_save_is_refused(tmp_path):
    store = trained()
    rows, visits = store._rows.numpy(), store._visits.numpy()
    for samples, match in (
        (np.arange(N - 1), "no row of sample 40"),
        (np.r_[:N, 3], "there already"),
        (np.r_[3, :N], "there already"),
    ):
        chunks = [(samples[:30], rows[samples[:30]], visits[samples[:30]])]
        chunks.append((samples[30:], rows[samples[30:]], visits[samples[30:]]))
        folder = tmp_path / str(len(samples) + samples[0])
        saved = arrow.Snapshot(0, 1, N, PRIOR, chunks).write(folder)
        arrow.write_manifest(folder, N, PRIOR, [(saved.rows, saved.size, saved.crc32)])
        refused(folder, match)


@pytest.mark.parametrize(
    ("store", "differs"),
    [
        (LocalTargets(N + 1, PRIOR), "num_samples 41 and this store has 42"),
        (LocalTargets(N, Dirichlet(K + 1, 0.9, 5.0, 0.1)), "num_classes 7 and this store has 8"),
        (LocalTargets(N, Dirichlet(K, 0.95, 5.0, 0.1)), "gamma 0.9 and this store has 0.95"),
        (LocalTargets(N, Dirichlet(K, 0.9, 6.0, 0.1)), "c 5.0 and this store has 6.0"),
    ],
)
def test_another_store_is_told_what_differs(saved, tmp_path, store, differs):
    for name, content in saved.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=differs):
        store.load(tmp_path)


def test_a_failed_write_leaves_no_file(tmp_path):
    def broken():
        yield from trained()._chunks()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        arrow.Snapshot(0, 1, N, PRIOR, broken()).write(tmp_path)
    assert list(tmp_path.iterdir()) == []
