import dataclasses

import pytest

from gradherd.comm.world import World


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("size", [0, -1])
def test_size_must_be_positive(size):
    with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
        World(rank=0, size=size)


@pytest.mark.parametrize("rank", [-1, 4, 5])
def test_rank_must_be_below_size(rank):
    with pytest.raises(ValueError, match=rf"rank must be in \[0, 4\), got {rank}"):
        World(rank=rank, size=4)


def test_any_world_can_be_built_without_a_process_group():
    world = World(rank=3, size=4)
    assert (world.rank, world.size, world.group) == (3, 4, None)
    assert world == World(3, 4)
    assert world != World(2, 4)


def test_a_world_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        World.single().rank = 1


def test_without_variables_there_is_one_process():
    assert World.detect() == World.single() == World(rank=0, size=1)


def test_variables_of_torchrun_are_read(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert World.detect() == World(rank=2, size=5)


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_one_variable_alone_is_ignored(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert World.detect() == World.single()


@pytest.mark.parametrize(
    ("rank", "size"), [("5", "5"), ("-1", "2"), ("0", "0"), ("x", "2"), ("0", "")]
)
def test_invalid_variables_raise_and_are_named(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError) as caught:
        World.detect()
    assert f"RANK={rank!r}" in str(caught.value)
    assert f"WORLD_SIZE={size!r}" in str(caught.value)
    assert "torchrun" in str(caught.value)
