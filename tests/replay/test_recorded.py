import json

import numpy as np
import pytest
import torch

from gradherd import SPARSIFIERS, ExDyna, Sparsify, TopK
from gradherd.cli.main import main
from gradherd.cli.recordings import load_vectors
from gradherd.ordering.registry import make_policy
from gradherd.replay.recorded import random_vectors, replay_order, replay_sparsify


def saved(tmp_path, array, name="z.npy"):
    path = tmp_path / name
    np.save(path, array, allow_pickle=True)
    return path


def test_random_vectors_are_the_published_draw():
    rows = np.random.RandomState(3).randn(20, 4)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows.reshape(4, 5, 4)  # time first, worker second
    rows = rows - rows.mean(0)
    assert np.array_equal(random_vectors(5, 4, 4, 3).numpy(), rows.transpose(1, 0, 2))


def test_chunks_do_not_show(monkeypatch):
    vectors = random_vectors(3, 41, 4, 0)
    whole = replay_order(vectors, make_policy("cd-grab"), rounds=4)
    monkeypatch.setattr("gradherd.replay.recorded._CHUNK", 15)
    assert replay_order(vectors, make_policy("cd-grab"), rounds=4) == whole


def test_start_and_rounds():
    vectors = random_vectors(2, 8, 3, 0)
    still = replay_order(vectors, make_policy("cd-grab"), rounds=0)
    assert still.orders == [list(range(8))] * 2 and len(still.bounds) == 1
    drawn = replay_order(vectors, make_policy("cd-grab"), rounds=0, start="random", seed=5)
    assert drawn.orders != still.orders
    fixed = replay_order(vectors, make_policy("fixed"), rounds=2, start="random")
    assert fixed.orders == still.orders and len(set(fixed.bounds)) == 1
    once = replay_order(vectors, make_policy("shuffle-once"), rounds=2, seed=5)
    assert once.orders == drawn.orders and len(set(once.bounds)) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint64, bool])
def test_any_real_numbers_are_read(tmp_path, dtype):
    array = np.arange(12).reshape(2, 3, 2).astype(dtype)
    vectors = load_vectors(saved(tmp_path, array))
    assert vectors.dtype == torch.float64 and np.array_equal(vectors.numpy(), array)


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (np.zeros((3, 4)), r"shape \(3, 4\), expected 3 axes"),
        (np.zeros((1, 2, 3, 4)), "expected 3 axes"),
        (np.zeros((2, 0, 3)), "is empty"),
        (np.zeros((0, 2, 3)), "is empty"),
        (np.full((1, 2, 2), "a"), "holds <U1, expected numbers"),
        (np.zeros((1, 2, 2), complex), "expected real numbers"),
        (np.full((1, 2, 2), None), "not a .npy file of numbers"),
        (np.array([[[0.0, 1.0], [2.0, np.nan]]]), "first at worker 0, unit 1, column 1"),
        (np.array([[[0.0, np.inf], [2.0, 0.0]]]), "1 values are NaN or infinite"),
        (np.array([[[0.0, 1e200], [2.0, 0.0]]]), r"values must be below 1e\+100"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, array, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_vectors(saved(tmp_path, array))


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x93NUMPY", b"\x93NUMPY\x01\x00v\x00{'descr'"]
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.npy: not a \.npy file of numbers"):
        load_vectors(path)


def test_archives_folders_and_missing_files_are_refused(tmp_path):
    np.savez(tmp_path / "two.npz", a=np.zeros(2), b=np.zeros(2))
    with pytest.raises(ValueError, match="an archive of several arrays"):
        load_vectors(tmp_path / "two.npz")
    with pytest.raises(ValueError, match="no such file"):
        load_vectors(tmp_path / "none.npy")
    with pytest.raises(ValueError, match="not a"):
        load_vectors(tmp_path)


KEYS = ["selected", "per_rank", "threshold", "density", "padding", "residual_norm", "bytes"]


def run(capsys, *args) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["replay", "sparsify", *(str(arg) for arg in args)])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def stream(steps, workers, dim, *, layers=10, decades=2.0, seed=0, dtype=np.float64):
    """Gradients half shared and half private, of layers whose scales span some decades."""
    draw = np.random.RandomState(seed)
    scale = np.repeat(10 ** (decades * draw.rand(layers)), dim // layers)
    shared = draw.randn(steps, 1, len(scale))
    private = draw.randn(steps, workers, len(scale))
    return (scale * (shared + private) / 2).astype(dtype)


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "gradients.npy"
    np.save(path, stream(6, 3, 2000))
    return path


@pytest.mark.parametrize("method", SPARSIFIERS)
def test_every_method_balances_its_books(capsys, recorded, tmp_path, method):
    out = tmp_path / "out"
    code, text, err = run(
        capsys, recorded, "--method", method, "--density", 0.01, "--out", out, "--json"
    )
    result = json.loads(text)
    assert (code, err) == (0, "")
    assert result["method"] == method and len(result["steps"]) == 6
    gradients = np.load(recorded)
    mean, residual = np.load(out / "mean.npy"), np.load(out / "residual.npy")
    assert (mean.shape, residual.shape) == ((6, 2000), (3, 2000))
    np.testing.assert_allclose(
        3 * mean.sum(0) + residual.sum(0), gradients.sum((0, 1)), rtol=1e-10, atol=1e-10
    )
    for step, row in zip(result["steps"], mean, strict=True):
        assert list(step) == KEYS
        assert step["density"] == step["selected"] / 2000
        assert len(step["per_rank"]) == 3
        assert np.count_nonzero(row) <= step["selected"]
    last = np.linalg.norm(residual, axis=1).mean()
    assert result["steps"][-1]["residual_norm"] == pytest.approx(last, rel=1e-9, abs=1e-12)
    assert sorted(path.name for path in out.iterdir()) == ["mean.npy", "residual.npy"]


def test_it_reads_well_for_people(capsys, recorded):
    code, out, _ = run(capsys, recorded, "--density", 0.01)
    assert code == 0
    assert "within 10 % of the target" in out and "100.0 %" in out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_any_real_numbers_are_fine(capsys, tmp_path, dtype):
    path = tmp_path / "g.npy"
    np.save(path, (10 * stream(3, 2, 500, decades=0)).astype(dtype))
    code, out, _ = run(capsys, path, "--density", 0.1, "--out", tmp_path / "o", "--json")
    assert code == 0 and json.loads(out)["steps"][0]["selected"] == 50
    assert np.load(tmp_path / "o" / "mean.npy").dtype == np.float32


def test_bad_files_get_one_line_and_leave_nothing(capsys, recorded, tmp_path):
    whole = recorded.read_bytes()
    bad = {
        "cut.npy": whole[: len(whole) // 2],
        "text.npy": b"hello",
        "empty.npy": b"",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    nan = stream(3, 2, 100, decades=0)
    nan[1, 1, 7] = np.nan
    np.save(tmp_path / "nan.npy", nan)
    np.save(tmp_path / "flat.npy", np.zeros((3, 4)))
    for name in [*bad, "nan.npy", "flat.npy", "missing.npy"]:
        code, out, err = run(capsys, tmp_path / name, "--out", tmp_path / "out", "--json")
        assert (code, out) == (2, ""), name
        assert len(err.splitlines()) == 1, err
        assert not list((tmp_path / "out").glob("*")), name
    (tmp_path / "file").write_text("in the way")
    code, _, err = run(capsys, recorded, "--out", tmp_path / "file")
    assert code == 2 and len(err.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "in the way"


def figures(gradients, method):
    found = replay_sparsify(gradients, Sparsify(method=method))
    off = [abs(step["density"] / method.density - 1) for step in found]
    return off, [step["padding"] - 1 for step in found]


@pytest.mark.parametrize("kind", ["plain", "large", "small", "drop", "one layer"])
def test_consensus_has_the_wanted_density_from_the_first_step(kind):
    gradients = stream(40, 4, 100_000, dtype=np.float32)
    if kind == "large":
        gradients *= 20
    if kind == "small":
        gradients /= 20
    if kind == "drop":
        gradients[20:] /= 10
    if kind == "one layer":
        gradients[:, :, 30_000:40_000] *= 1e4
    off, padding = figures(gradients, ExDyna(density=0.001))
    assert max(off) == 0
    assert max(padding) <= 4 * 27 / 100 - 1 + 1e-9  # 1.05 times 25, rounded up


def test_the_others_show_what_they_are_known_for():
    gradients = stream(30, 4, 100_000, dtype=np.float32)
    off, _ = figures(gradients, ExDyna(density=0.001, threshold="online"))
    assert min(off) > 1  # A start that does not know the scale.
    off, _ = figures(gradients, TopK(density=0.001))
    assert 1.5 < np.mean(off) < 3  # Built up to near the number of workers.
