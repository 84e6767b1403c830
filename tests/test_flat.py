import torch
from torch import nn

from gradherd.flat import FlatSpec


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    net[1].weight.requires_grad_(False)
    return net


def test_order_is_that_of_parameters_and_frozen_ones_are_left_out() -> None:
    net = model()
    spec = FlatSpec.of(net)
    assert spec.names == ("0.weight", "0.bias", "1.bias", "2.weight")
    assert spec.offsets == (0, 6, 8, 10)
    assert spec.size == 12


def test_views_share_memory_with_the_vector() -> None:
    net = model()
    trainable = [p for p in net.parameters() if p.requires_grad]
    flat = nn.utils.parameters_to_vector(trainable).detach()
    views = FlatSpec.of(net).views(flat)
    for name, p in net.named_parameters():
        if p.requires_grad:
            assert torch.equal(views[name], p)
    views["0.bias"].fill_(7.0)
    assert flat[6:8].tolist() == [7.0, 7.0]


def test_views_of_several_vectors() -> None:
    spec = FlatSpec.of(model())
    vectors = torch.arange(24.0).view(2, 12)
    assert spec.views(vectors)["0.weight"].shape == (2, 2, 3)
    assert spec.views(vectors)["2.weight"].tolist() == [[[10.0, 11.0]], [[22.0, 23.0]]]


def test_tied_parameters_have_one_place() -> None:
    net = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    net[1].weight = net[0].weight
    assert FlatSpec.of(net).names == ("0.weight", "1.bias")


def test_a_scalar_parameter_has_a_scalar_view() -> None:
    net = nn.Module()
    net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    spec = FlatSpec.of(net)
    assert spec.size == 1
    assert spec.views(torch.tensor([3.0]))["scale"].shape == ()


def test_a_model_without_trainable_parameters_is_empty() -> None:
    spec = FlatSpec.of(nn.ReLU())
    assert spec.size == 0
    assert spec.views(torch.zeros(0)) == {}
