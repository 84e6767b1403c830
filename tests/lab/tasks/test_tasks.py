"""Every task, on made-up data: loads, learns, measures, and its examples can be told apart."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gradherd.cli.main import main
from gradherd.comm.world import World
from gradherd.lab.ranks import RankError, run_ranks
from gradherd.lab.tasks import TASKS, Defaults, Split, find_task
from gradherd.lab.train.trainer import full_loss
from gradherd.rows.capture import Capture
from tests.lab.tasks.fake_data import EVERY_TASK, MAKERS, publish, task_named

PARAMETERS = {
    "digits": 650,
    "digits-mlp": 301_066,
    "hmda": 19,
    "wikitext2-lstm": 1_081_792,
    "m4-mlp": 5_569,
    "wikitext2-gpt2": 6_846_080,
    "cifar10-lenet": 62_006,
    "cifar10-resnet18": 11_173_962,
    "fashion-lenet": 61_706,
    "sst2-transformer": 1_382_210,
}
CARRIED = f"{Path(__file__).parents[3]}/studies/tasks/lstm.py:WikiText2CarriedLSTM"
# Examples of a step: the large models get few.
BATCH = {
    "wikitext2-gpt2": 2,
    "wikitext2-lstm": 8,
    "cifar10-resnet18": 2,
}


@pytest.fixture
def loaded(request, any_edition, tmp_path):
    task = task_named(request.param)
    for name in task.data:
        MAKERS[name](tmp_path, "public")
    return task, task.load(tmp_path, limit=64)


every_task = pytest.mark.parametrize("loaded", EVERY_TASK, indirect=True)


def batch(task, columns):
    return tuple(column[: BATCH.get(task.name, 32)] for column in columns)


@pytest.mark.parametrize("name", EVERY_TASK)
def test_parameters_are_counted(name):
    assert sum(p.numel() for p in task_named(name).model().parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", EVERY_TASK)
def test_models_come_from_the_global_generator(name):
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights.append(nn.utils.parameters_to_vector(task_named(name).model().parameters()))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2]) == (name == "digits")


@pytest.mark.parametrize("name", EVERY_TASK)
def test_tasks_describe_themselves(name):
    task = task_named(name)
    assert task.name == name and task.description and task.metric_name
    assert "\n" not in task.description and isinstance(task.higher_is_better, bool)
    assert set(task.data) <= set(MAKERS)
    assert isinstance(task.defaults, Defaults) and task.defaults.source.endswith(".")
    if name in TASKS:  # else its file is executed again
        assert task == task_named(name)


@every_task
def test_two_steps_on_a_slice_learn(loaded):
    task, split = loaded
    assert all(len(column) == 64 for column in split.train)
    assert all(16 <= len(column) <= 64 for column in split.test)
    columns = batch(task, split.train)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = task.loss(model, *columns)
        assert loss.shape == ()
        losses.append(loss.item())
        if len(losses) < 3:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert losses[2] < losses[0]


@every_task
def test_the_loss_is_the_mean_over_examples(loaded):
    task, split = loaded
    model = task.model().eval()  # BatchNorm ties examples together while it trains
    columns = tuple(column[:3] for column in split.train)
    with torch.no_grad():
        alone = [task.loss(model, *(column[i : i + 1] for column in columns)) for i in range(3)]
        together = task.loss(model, *columns)
    torch.testing.assert_close(together, torch.stack(alone).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "loaded", [name for name in EVERY_TASK if name != "cifar10-resnet18"], indirect=True
)
def test_the_gradient_of_every_example_can_be_read(loaded):
    task, split = loaded
    model = task.model()
    parameters = list(model.parameters())
    columns = tuple(column[:2] for column in split.train)
    capture = Capture(model)
    task.loss(model, *columns).backward()
    rows = capture.pop_rows(2)
    capture.remove_hooks()
    for at, row in enumerate(rows):
        loss = task.loss(model, *(column[at : at + 1] for column in columns))
        alone = torch.autograd.grad(loss, parameters)
        expected = torch.cat([grad.flatten() for grad in alone])
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-6)


@every_task
def test_measuring_leaves_the_model_alone(loaded):
    task, split = loaded
    model = task.model()
    modules = list(model.modules())
    modules[-1].eval()  # one that someone froze
    modes = [module.training for module in modules]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    value = task.metric(model, *batch(task, split.test))
    assert isinstance(value, float) and value == value
    assert [module.training for module in modules] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("limit", [0, -3])
@pytest.mark.parametrize("loaded", ["digits", "wikitext2-lstm"], indirect=True)
def test_a_limit_keeps_at_least_one(loaded, tmp_path, limit):
    with pytest.raises(ValueError, match=f"limit must be at least 1, got {limit}"):
        loaded[0].load(tmp_path, limit=limit)


class Recite(nn.Module):
    """Gives answers that were prepared, in order, whatever is asked."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.at = answers, 0

    def forward(self, asked, *_):
        answer = self.answers[self.at : self.at + len(asked)]
        self.at += len(asked)
        return answer


@pytest.mark.parametrize(
    "loaded",
    [name for name in EVERY_TASK if task_named(name).metric_name.endswith("accuracy (%)")],
    indirect=True,
)
def test_right_and_wrong_answers_are_counted(loaded):
    task, split = loaded
    targets = split.test[-1]
    if task.name == "hmda":
        scores = (2 * targets - 1).unsqueeze(1)
    else:
        scores = nn.functional.one_hot(targets, 10).float()
    assert task.metric(Recite(scores), *split.test) == 100
    assert task.metric(Recite(-scores), *split.test) == 0
    half = torch.where(torch.arange(len(scores))[:, None] % 2 == 0, scores, -scores)
    assert task.metric(Recite(half), *split.test) == 50


@pytest.mark.parametrize("loaded", ["wikitext2-lstm", "wikitext2-gpt2"], indirect=True)
def test_perplexity_of_a_know_all_and_of_a_guesser(loaded):
    task, split = loaded
    words = split.test[0][:, 1:]
    size = int(words.max()) + 1
    sure = 50 * nn.functional.one_hot(words, size).float()
    assert task.metric(Recite(sure), *split.test) == pytest.approx(1)
    assert task.metric(Recite(0 * sure), *split.test) == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("loaded", [CARRIED], indirect=True)
def test_columns_of_a_text_are_read_beside_each_other(loaded, tmp_path):
    task, split = loaded
    (text,) = task_named("wikitext2-lstm").load(tmp_path, limit=64).train
    # Sequence i of column c is sequence 4 c + i of the text, and example 16 i + c.
    for c, i in ((0, 0), (0, 1), (5, 3), (15, 3)):
        assert torch.equal(split.train[0][16 * i + c], text[4 * c + i])
    torch.manual_seed(0)
    model = task.model()
    columns = text.view(16, 4, 36)
    whole = torch.cat([columns[:, 0], *columns[:, 1:, 1:].unbind(1)], 1)  # without a cut
    with torch.no_grad():
        model.embedding.weight.mul_(20)  # so that the state matters
        logits = model.head(model.lstm(model.embedding(whole[:, :-1]))[0]).flatten(0, 1)
        expected = float(nn.functional.cross_entropy(logits, whole[:, 1:].flatten()))
        forgetful = task_named("wikitext2-lstm").model()
        forgetful.load_state_dict(model.state_dict())
        reset = float(task_named("wikitext2-lstm").loss(forgetful, text))
    for chunk in (16, 24, 64):
        found = full_loss(task, model, split.train, World.single(), chunk)
        assert found == pytest.approx(expected, rel=1e-5)
    assert task.metric(model, *split.train) == pytest.approx(math.exp(expected), rel=1e-4)
    assert abs(reset - expected) > 1e-4 * expected
    with pytest.raises(ValueError, match="needs 16 sequences or more, got 15"):
        task.load(tmp_path, limit=15)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--limit=8", "wikitext2-lstm-carried needs 16 sequences or more, got 8"),
        ("--limit=32 --unit=2", "a state from batch to batch: unit must be batch_size"),
    ],
)
def test_settings_that_a_carried_state_refuses(
    any_edition, capsys, tmp_path, monkeypatch, options, says
):
    MAKERS["wikitext-2"](tmp_path / "data", "public")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["train", CARRIED, "--virtual", *options.split(), "--data-dir=data", "--out=out"])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("gradherd: ") and err.endswith(f"{says}\n") and err.count("\n") == 1
    assert "Error" not in err and not (tmp_path / "out").exists()


def carried_model():
    find_task(CARRIED).model()


def test_a_carried_state_refuses_real_ranks():
    with pytest.raises(RankError, match="takes simulated workers only: --virtual"):
        run_ranks(carried_model, 1)


def test_damaged_data_are_named_and_leave_no_folder(any_edition, capsys, tmp_path, monkeypatch):
    MAKERS["wikitext-2"](tmp_path / "data", "public")
    publish(tmp_path / "data")
    (tmp_path / "data" / "wikitext-2" / "wiki.test.tokens").write_text("too short\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["train", CARRIED, "--virtual", "--data-dir=data", "--out=out"])
    assert stop.value.code == 1 and not (tmp_path / "out").exists()
    assert "wiki.test.tokens is truncated: 10 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("loaded", ["m4-mlp"], indirect=True)
def test_smape_of_the_truth_and_of_three_times_the_truth(loaded):
    task, split = loaded
    _, true, means, scales = split.test
    assert task.metric(Recite((true - means) / scales), *split.test) == pytest.approx(0, abs=1e-4)
    wrong = (3 * true - means) / scales
    assert task.metric(Recite(wrong), *split.test) == pytest.approx(100, abs=1e-3)


def test_forecasts_feed_on_themselves():
    model = task_named("m4-mlp").model()
    seen = torch.randn(2, 20)
    first = model.net(seen)
    second = model.net(torch.cat([seen[:, 1:], first], 1))
    torch.testing.assert_close(model(seen, 2), torch.cat([first, second], 1))


@pytest.mark.parametrize("name", ["cifar10-resnet18", "cifar10-lenet"])
def test_augmentation_moves_and_mirrors(name):
    generator = torch.Generator().manual_seed(0)
    images = (torch.arange(3 * 32 * 32) % 255 + 1).to(torch.uint8).view(1, 3, 32, 32)
    images, labels = images.repeat(40, 1, 1, 1), torch.arange(40)
    moved, same_labels = task_named(name).augment(generator, images, labels)
    assert moved.shape == images.shape and moved.dtype == torch.uint8
    assert torch.equal(labels, same_labels)
    padded = nn.functional.pad(images[0], (4, 4, 4, 4))
    crops = [padded[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
    same = [any(torch.equal(one, crop) for crop in crops) for one in moved]
    flip = [any(torch.equal(one.flip(2), crop) for crop in crops) for one in moved]
    assert all(a != b for a, b in zip(same, flip, strict=True)) and any(same) and any(flip)


def test_a_split_has_columns_of_one_length():
    with pytest.raises(ValueError, match=r"test needs tensors of one length.*\[2, 3\]"):
        Split((torch.zeros(1),), (torch.zeros(2), torch.zeros(3)))
    with pytest.raises(ValueError, match="train needs tensors"):
        Split((torch.zeros(0),), (torch.zeros(2),))


GOOD = dict(workers=2, batch_size=4, lr=0.1, epochs=1, seeds=1, source="A test.")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"unit": 3}, "unit must divide batch_size 4, got 3"),
        ({"optimizer": "lion"}, "optimizer must be sgd or adamw, got 'lion'"),
        ({"workers": "2"}, "workers must be a whole number, got '2'"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"lr": float("nan")}, r"lr must be in \(0, inf\), got nan"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum 0.9 has no effect on adamw"),
        ({"weight_decay": -1}, r"weight_decay must be in \[0, inf\), got -1"),
        ({"clip": 0.0}, r"clip must be in \(0, inf\), got 0.0"),
        ({"lr_drop": 0.1}, "lr_drop and lr_drop_every go together"),
        ({"lr_drop": 2.0, "lr_drop_every": 3}, r"lr_drop must be in \(0, 1\], got 2.0"),
        ({"lr_drop": 0.5, "lr_drop_every": 0}, "lr_drop_every must be at least 1"),
    ],
)
def test_settings_are_checked(change, complaint):
    Defaults(**GOOD)
    with pytest.raises(ValueError, match=complaint):
        Defaults(**{**GOOD, **change})
