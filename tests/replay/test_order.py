import numpy as np
import pytest
import torch

from gradherd.ordering.registry import make_policy
from gradherd.replay.order import load_vectors, random_vectors, replay_order


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
    monkeypatch.setattr("gradherd.replay.order._CHUNK", 15)
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
