"""The label audit against numpy's float64 recursion of the same predictions."""

import shutil
import zlib

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dps_dist import recipes
from dps_dist.data import manifest as manifests
from dps_dist.data.hold_out import split
from dps_dist.data.loader import noisy_labels
from dps_dist.errors import InputError
from dps_dist.report import audit, audit_page
from dps_dist.targets import Dirichlet, LocalTargets, arrow
from dps_dist.train.checkpoint import Writer
from dps_dist.train.manifest import Moment
from dps_dist.train.storage import Storage
from dps_dist.train.trained import names_sum
from tests.report.pages import Page

UNSEEN = [5, 900]  # which no batch showed
VISITS = 4
AFTER_AN_EPOCH = Moment(1, 0, 18)


class Made:
    """A run folder whose predictions are known: e [N, K] is their discounted mean in float64."""

    def __init__(self, folder, data, *settings):
        self.folder = folder
        noise = ["data.noise.kind=symmetric", "data.noise.rate=0.4", "data.hold_out=100"]
        self.config = recipes.load("digits", [f"data.path={data}", *noise, *settings])
        self.data = manifests.read(data, "train")
        self.labels, n = noisy_labels(self.config.data, self.data), len(self.data)
        held_out = split(n, 100, 0).held_out
        self.trained = np.setdiff1d(np.arange(n), [*held_out, *UNSEEN])
        rng, gamma = np.random.default_rng(3), self.config.method.gamma
        self.store = LocalTargets(n, Dirichlet(10, gamma, self.config.method.c))
        sums, weight = np.zeros((n, 10)), 0.0
        for _ in range(VISITS):
            z = rng.normal(size=(n, 10)) * 1.5
            z[np.arange(n), self.data.clean_labels] += 4
            p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            sums, weight = gamma * sums + p, gamma * weight + 1
            own = torch.from_numpy(self.trained)
            self.store.update(own, torch.from_numpy(p[self.trained]).float())
        self.e = sums / weight
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(recipes.as_yaml(self.config))

    def finish(self):
        self.store.save(self.folder / "targets", labels=self.labels)
        (self.folder / "summary.json").write_text("{}")
        return self.folder

    def checkpoint(self, moment=AFTER_AN_EPOCH, **changes):
        facts = {
            "samples": len(self.data),
            "classes": 10,
            "sum of labels": zlib.crc32(self.labels.astype("<i8").tobytes()),
            "sum of class names": names_sum(self.data),
        }
        writer = Writer(Storage(self.folder), self.config.train.checkpoint, "a1", None)
        writer.save(moment, {"data": facts | changes}, self.store.snapshot())
        writer.wait()
        return self.folder


@pytest.fixture
def made(digits, tmp_path):
    return Made(tmp_path / "run", digits)


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    made = Made(tmp_path_factory.mktemp("audit") / "run", digits)
    made.finish()
    return made


@pytest.fixture(scope="module")
def table(finished):
    return audit.rank(finished.folder)


def assert_is_numpys(table, made):
    """Each column, computed again."""
    columns = {name: np.array(table[name]) for name in table.column_names}
    index, e = columns["index"], made.e[columns["index"]]
    assert np.array_equal(np.sort(index), made.trained)
    labels, rows = made.labels[index], np.arange(len(index))
    others = e.copy()
    others[rows, labels] = -1
    margin = others.max(1) - e[rows, labels]
    near = np.abs(margin) < 1e-3  # where rounding to float16 decides
    suggested = np.where(margin > 0, others.argmax(1), labels)
    assert (columns["suggested"] == suggested)[~near].mean() > 0.998  # but for ties among others
    assert np.array_equal(columns["label"], labels)
    assert np.allclose(columns["score"], 1 - e[rows, labels], atol=1e-3)
    assert np.allclose(columns["label_evidence"], e[rows, labels], atol=1e-3)
    assert np.allclose(
        columns["suggested_evidence"], np.maximum(others.max(1), e[rows, labels]), atol=1e-3
    )
    assert np.allclose(columns["entropy"], -(e * np.log(e)).sum(1), atol=1e-2)
    assert (columns["visits"] == VISITS).all()
    assert (np.diff(columns["score"]) <= 0).all()
    names = np.array(made.data.class_names)
    assert list(columns["label_name"]) == list(names[labels])
    assert list(columns["suggested_name"]) == list(names[columns["suggested"]])
    assert list(columns["path"]) == [made.data.paths[int(i)] for i in index]


def test_ranks_by_the_evidence(table, finished):
    assert table.column_names == [
        "index", "path", "label", "label_name", "suggested", "suggested_name",
        "label_evidence", "suggested_evidence", "entropy", "visits", "score",
    ]  # fmt: skip
    assert_is_numpys(table, finished)


def test_an_unfinished_run_is_ranked_by_its_newest_checkpoint(made, table):
    made.checkpoint()
    assert audit.rank(made.folder).equals(table)


def test_many_chunks_are_one_ranking(made, table, monkeypatch):
    monkeypatch.setattr(arrow, "CHUNK_BYTES", 2 * 10 * 37)
    assert audit.rank(made.finish()).equals(table)


def test_the_files_of_several_ranks_are_one_ranking(made, table):
    samples, coded, visits = next(iter(made.store.snapshot().chunks))
    written, prior = [], made.store.prior
    for rank in range(3):
        own = samples % 3 == rank
        rows = [(samples[own], coded[own], visits[own])]
        snapshot = arrow.Snapshot(rank, 3, len(samples), prior, rows)
        saved = snapshot.write(made.folder / "targets", labels=made.labels)
        written.append((saved.rows, saved.size, saved.crc32))
    arrow.write_manifest(made.folder / "targets", len(samples), prior, written)
    (made.folder / "summary.json").write_text("{}")
    assert audit.rank(made.folder).equals(table)


def test_equal_scores_are_in_order_of_samples(made):
    made.store._rows.fill_(0.1)
    table = audit.rank(made.finish())
    assert np.array_equal(np.array(table["index"]), made.trained)
    assert np.array_equal(np.array(table["suggested"]), made.labels[made.trained])  # not class 0


def test_writes_parquet(made, table, tmp_path):
    made.finish()
    own = audit.rank(made.folder)
    written = audit.write(own, audit.beside(made.folder))
    assert written == made.folder / "audit.parquet" and pq.read_table(written).equals(table)
    other = audit.write(own, tmp_path / "new/audit.parquet")
    assert other.read_bytes() == audit.write(audit.rank(made.folder), other).read_bytes()
    assert [path.name for path in other.parent.iterdir()] == ["audit.parquet"]


def test_other_readers_open_it(made, tmp_path):
    frame = pandas.read_parquet(audit.write(audit.rank(made.finish()), tmp_path / "a.parquet"))
    assert len(frame) == len(made.trained) and frame["score"].is_monotonic_decreasing


def test_agreement_counts_suggestions(table):
    margin = np.array(table["suggested_evidence"]) - np.array(table["label_evidence"])
    found = audit.agreement(table)
    assert found["samples"] == len(margin) and found["agree"] == (margin == 0).mean()
    assert found["suggested"] == {t: (margin > t).sum() for t in (0, 0.25, 0.5, 0.75, 0.9)}
    assert audit.suggestions(table, 1).num_rows == 0
    assert audit.suggestions(table, 0.5).num_rows == found["suggested"][0.5]
    with pytest.raises(InputError, match=r"threshold is -0.1: give a number from 0"):
        audit.suggestions(table, -0.1)


def test_quality_is_that_of_all_pairs(table, finished):
    true, found = finished.data.clean_labels, audit.quality(table, finished.data.clean_labels)
    index, score = np.array(table["index"]), np.array(table["score"])
    wrong = finished.labels[index] != true[index]
    pairs = score[wrong][:, None] - score[~wrong][None]
    assert found["auroc"] == pytest.approx(((pairs > 0) + (pairs == 0) / 2).mean())
    hits = np.cumsum(wrong)  # the table is sorted
    assert found["average_precision"] == pytest.approx(
        (hits / np.arange(1, len(hits) + 1))[wrong].mean(), abs=1e-3
    )
    suggested = np.array(table["suggested"])
    assert found["wrong"] == wrong.sum()
    leaves = suggested != finished.labels[index]
    assert found["precision"] == pytest.approx(wrong[leaves].mean())
    assert found["recall"] == pytest.approx(leaves[wrong].mean())
    assert found["righted"] == pytest.approx((suggested == true[index])[wrong].mean())
    with pytest.raises(InputError, match=r"0 of 1098 labels are wrong"):
        audit.quality(table, finished.labels)


def copied(digits, folder):
    shutil.copytree(digits, folder)
    return folder


def test_a_corrected_manifest_can_be_trained_on(digits, tmp_path):
    """As docs/audit.md says: beside links to the images, under the name of the old one."""
    data = copied(digits, tmp_path / "data")
    before = (data / "train.parquet").read_bytes()
    made = Made(tmp_path / "run", data)
    ranked = audit.rank(made.finish())
    table = audit.suggestions(ranked, 0.2)
    fixed = audit.fix(made.folder, ranked, threshold=0.2)
    assert fixed == data / "train.corrected.parquet"
    assert (data / "train.parquet").read_bytes() == before
    own, old = pq.read_table(fixed), pq.read_table(data / "train.parquet")
    assert own.schema.equals(old.schema) and own.drop(["label"]).equals(old.drop(["label"]))
    about = {key.decode(): text.decode() for key, text in own.schema.metadata.items()}
    assert about["corrected_by"] == str(made.folder) and about["corrected_above"] == "0.2"
    assert int(about["corrected_labels"]) == table.num_rows > 0

    folder = tmp_path / "corrected"
    folder.mkdir()
    for name in ("train.beton", "val.beton", "val.parquet"):
        (folder / name).symlink_to(data / name)
    shutil.copy(fixed, folder / "train.parquet")
    labels = made.labels.copy()
    labels[np.array(table["index"])] = np.array(table["suggested"])
    read = manifests.read(folder, "train")
    assert np.array_equal(read.labels, labels)
    assert np.array_equal(read.clean_labels, made.data.clean_labels)

    with pytest.raises(InputError, match=r"train.corrected.parquet is there already: remove it"):
        audit.fix(made.folder, ranked)
    elsewhere = audit.fix(made.folder, ranked, tmp_path / "new/train.parquet")
    assert pq.read_table(elsewhere)["label"].to_pylist() != own["label"].to_pylist()


def test_a_data_folder_with_a_colon_is_corrected(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copied(digits, "data:v2")
    config = recipes.load("digits", ["data.path=data:v2"])
    (tmp_path / "config.yaml").write_text(recipes.as_yaml(config))
    columns = {"index": [3], "suggested": [7], "suggested_evidence": [0.9], "label_evidence": [0.1]}
    fixed = audit.fix(tmp_path, pa.table(columns))
    with fixed.open("rb") as file:
        assert pq.read_table(file)["label"][3].as_py() == 7


@pytest.mark.parametrize("known", [False, True])
def test_labels_of_unknown_truth_are_corrected_as_clean_ones(digits, tmp_path, known):
    """Else the clean label would be the one that the audit rejects; where it is known it stays."""
    data = copied(digits, tmp_path / "data")
    if not known:  # as a data set with a wrong label is prepared: nobody knows
        table = pq.read_table(data / "train.parquet")
        labels = noisy_labels(
            Made(tmp_path / "noisy", data).config.data, manifests.read(data, "train")
        )
        for name in ("label", "clean_label"):
            place = table.schema.get_field_index(name)
            table = table.set_column(place, table.schema.field(place), pa.array(labels))
        pq.write_table(table, data / "train.parquet")
    made = Made(tmp_path / "run", data, *([] if known else ["data.noise.kind=none"]))
    fixed = pq.read_table(audit.fix(made.folder, audit.rank(made.finish())))
    changed = (np.array(fixed["label"]) != made.labels).sum()
    assert changed > 0
    assert (np.array(fixed["clean_label"]) != made.data.clean_labels).sum() == (
        0 if known else changed
    )


@pytest.mark.parametrize("name", ["baseline", "crl", "kd", "dlb"])
def test_methods_without_evidence_are_refused(name, tmp_path):
    (tmp_path / "config.yaml").write_text(
        recipes.as_yaml(recipes.load("digits", [f"method.name={name}"]))
    )
    with pytest.raises(
        InputError, match=rf"is {name}, which keeps no evidence of classes: "
    ) as said:
        audit.rank(tmp_path)
    assert str(said.value).endswith("give a run of dps, dps_plus, te, pskd, elr")


def test_other_methods_evidence_is_ranked(digits, tmp_path):
    """Temporal Ensembling's average is the store's evidence with γ = a."""
    config = recipes.load("digits", [f"data.path={digits}", "method.name=te"])
    (tmp_path / "config.yaml").write_text(recipes.as_yaml(config))
    labels = manifests.read(digits, "train").labels
    store = LocalTargets(1200, Dirichlet(10, config.method.a, 1.0))
    store.update(torch.arange(1200), torch.eye(10)[torch.from_numpy(labels)])
    store.save(tmp_path / "targets", labels=labels)
    (tmp_path / "summary.json").write_text("{}")
    assert np.array(audit.rank(tmp_path)["score"]).tolist() == [0.0] * 1200


def test_what_is_no_finished_epoch_is_refused(made):
    with pytest.raises(InputError, match=r"run has not finished an epoch: try again when it has"):
        audit.rank(made.folder)
    made.checkpoint(Moment(0, 640, 10))  # in the middle of the first
    with pytest.raises(InputError, match=r"run has not finished an epoch"):
        audit.rank(made.folder)
    with pytest.raises(InputError, match=r"is not the folder of a run, it has no config.yaml"):
        audit.rank(made.folder.parent / "nothing")


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.noise.seed=1", "sum of labels"),
        ("data.noise.kind=none", "sum of labels"),
        ("data.path=PHOTOS", "samples 50, then 1200"),
        ("data.path=nowhere", r"nowhere/train.beton does not exist: run `dps prepare"),
    ],
)
def test_other_data_are_refused(made, photos, setting, said, finish):
    folder = made.finish() if finish else made.checkpoint()
    fields = recipes.parse((folder / "config.yaml").read_text(), "")
    config = recipes.resolve(fields, [setting.replace("PHOTOS", str(photos))], where="")
    (folder / "config.yaml").write_text(recipes.as_yaml(config))
    with pytest.raises(InputError, match=said) as refused:
        audit.rank(folder)
    if "nowhere" not in said:
        assert "set data.path in its config.yaml" in str(refused.value)


def test_other_class_names_are_refused(made):
    made.checkpoint(**{"sum of class names": 7})
    with pytest.raises(InputError, match=r"is not what .* was trained on \(sum of class names"):
        audit.rank(made.folder)


@pytest.mark.parametrize("at", [0, -1])
def test_damaged_targets_are_refused(made, at):
    folder = made.finish() / "targets"
    path = next(folder.glob("*.arrow"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if at == 0 else content[:at])
    with pytest.raises(InputError, match=r"targets.*is damaged|bytes instead of|not a file"):
        audit.rank(made.folder)


def test_the_page_shows_the_top_samples(finished, table, tmp_path):
    out = audit_page.write(finished.folder, table, tmp_path / "new/audit.html", top=12)
    text = out.read_text()
    page = Page(text)
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    top = audit.suggestions(table).slice(0, 12).to_pylist()
    assert len(images) == 12
    for attrs, row in zip(images, top, strict=True):
        assert attrs["src"].startswith("data:image/png;base64,")
        assert attrs["alt"] == f"sample {row['index']}, labelled {row['label_name']}"
        assert f"{row['label_name']} → {row['suggested_name']}" in page.text
        assert f"score {row['score']:.3f}" in page.text and row["path"] in page.text
        for share in (row["label_evidence"], row["suggested_evidence"]):
            assert f"width:{100 * share:.1f}%" in text
    assert f"{audit.agreement(table)['suggested'][0.5]:,}" in page.text
    for tag, attrs in page.tags:
        assert tag not in ("script", "iframe", "object", "embed")
        for name in ("src", "href", "srcset"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
    assert "@import" not in text and "url(" not in text and "prefers-color-scheme: dark" in text


def test_names_are_text_on_the_page(finished, table):
    nasty = "<script>alert(1)</script>&"
    row = table.slice(0, 1).to_pylist()[0] | {"label_name": nasty, "path": nasty}
    page = Page(audit_page.page(nasty, table, [row], [b""]))
    assert not any(tag == "script" for tag, _ in page.tags) and nasty in page.text


def test_a_page_without_suggestions_says_so(finished, table, tmp_path):
    agreed = table.filter(pa.compute.equal(table["suggested"], table["label"]))
    text = audit_page.write(finished.folder, agreed, tmp_path / "a.html").read_text()
    assert "there is nothing to suggest" in text and "<img" not in text


def test_pages_that_make_no_sense_are_refused(finished, table, tmp_path):
    with pytest.raises(InputError, match=r"--html is .*a.png: give a page's name"):
        audit_page.write(finished.folder, table, tmp_path / "a.png")
    with pytest.raises(InputError, match=r"--top is 0: give 1 or more"):
        audit_page.write(finished.folder, table, tmp_path / "a.html", top=0)


def test_metadata_say_what_the_score_is(table, finished):
    about = {key.decode(): text.decode() for key, text in table.schema.metadata.items()}
    assert about["run"] == str(finished.folder) and "evidence for the label" in about["score"]
