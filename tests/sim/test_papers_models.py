"""The papers' models: numbers of parameters, shapes, and initial values that depend on the seed alone.

No paper prints the number of parameters of a whole network, but for the 2NN of McMahan et al. Where a paper prints
the layers, their sizes are compared; the sums are those of these layers.
"""

import hashlib
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from afflux.sim.clients.flat_model import reproducible_libraries
from afflux.sim.models import MODELS, build_model
from afflux.sim.models.networks import NETWORKS
from conftest import check_error, check_refused, generator

MNIST, CIFAR, TEXT = (1, 28, 28), (3, 32, 32), (80,)
#: Small images: what these tests check does not depend on the size.
SHAPES = {"char-lstm": TEXT, "resnet18-bn": (3, 8, 8), "resnet18-gn": (3, 8, 8)}


@pytest.fixture(autouse=True)
def one_thread():
    with reproducible_libraries():
        yield


def count(name, shape, num_classes):
    return sum(parameter.numel() for parameter in build_model(name, shape, num_classes, 0).parameters())


def sizes(name, shape, num_classes, kind):
    """Shapes of the weights of all layers of a kind."""
    module = build_model(name, shape, num_classes, 0)
    return [tuple(layer.weight.shape) for layer in module.modules() if isinstance(layer, kind)]


def test_logistic_regression():
    assert count("logreg", MNIST, 10) == 784 * 10 + 10


def test_the_perceptron_of_mcmahan():
    # McMahan et al. (2017), section 3: "a simple multilayer-perceptron with 2-hidden layers with 200 units each ...
    # (199,210 total parameters)".
    assert count("mlp", MNIST, 10) == 199_210


def test_the_demos_cnn():
    assert count("cnn", (1, 8, 8), 10) == 160 + 4640 + (128 * 64 + 64) + 650
    assert count("cnn", MNIST, 10) == 160 + 4640 + (32 * 49 * 64 + 64) + 650


def test_lenet():
    # LeCun et al. (1998), section II.B: layers C1, C3, C5, F6 of 6, 16, 120 and 84, on a field of 32x32 pixels.
    assert sizes("lenet5", (1, 32, 32), 10, nn.Conv2d) == [(6, 1, 5, 5), (16, 6, 5, 5)]
    assert sizes("lenet5", (1, 32, 32), 10, nn.Linear) == [(120, 400), (84, 120), (10, 84)]
    assert count("lenet5", (1, 32, 32), 10) == 61_706
    assert count("lenet5", MNIST, 10) == 61_706, "images of 28x28 pixels lie in this field"
    # WKAFL, section 6.1.1: "For CIFAR10, we adopted LeNet".
    assert count("lenet5", CIFAR, 10) == 62_006


def test_anarchic_fls_cnn():
    # Anarchic FL, Table 1: 5x5x32, 5x5x64, 1024x512, 512x128, 128x10.
    assert sizes("afl-cnn", MNIST, 10, nn.Conv2d) == [(32, 1, 5, 5), (64, 32, 5, 5)]
    assert sizes("afl-cnn", MNIST, 10, nn.Linear) == [(512, 1024), (128, 512), (10, 128)]
    # The same table on the images of CIFAR-10.
    assert sizes("afl-cnn", CIFAR, 10, nn.Conv2d) == [(32, 3, 5, 5), (64, 32, 5, 5)]
    assert sizes("afl-cnn", CIFAR, 10, nn.Linear) == [(512, 1600), (128, 512), (10, 128)]
    assert count("afl-cnn", CIFAR, 10) == 2_432 + 51_264 + 819_712 + 65_664 + 1_290 == 940_362


def test_ca2fls_cnn():
    assert sizes("ca2fl-cnn", CIFAR, 10, nn.Conv2d) == [(32, 3, 3, 3), (32, 32, 3, 3)]
    assert sizes("ca2fl-cnn", CIFAR, 10, nn.Linear) == [(256, 2048), (64, 256), (10, 64)]
    assert count("ca2fl-cnn", CIFAR, 10) == 896 + 9_248 + 524_544 + 16_448 + 650 == 551_786


def test_the_cnn_of_fadas_authors():
    assert sizes("fadas-cnn", CIFAR, 10, nn.Conv2d) == [(32, 3, 5, 5), (64, 32, 5, 5)]
    assert sizes("fadas-cnn", CIFAR, 10, nn.Linear) == [(512, 4096), (128, 512), (10, 128)]
    assert count("fadas-cnn", CIFAR, 10) == 2_432 + 51_264 + 2_097_664 + 65_664 + 1_290 == 2_218_314


def test_wkafls_cnns():
    # WKAFL, section 6.1.1: "two convolutional layers ... followed by maxpooling layers ... a dense layer with 512
    # units" for EMNIST, and "a dense layer with 16000 units" for CelebA: 40 x 40 x 10 inputs.
    assert count("wkafl-cnn", MNIST, 10) == 582_026
    assert count("wkafl-cnn", MNIST, 62) == 582_026 + 52 * 513
    assert sizes("wkafl-celeba", (3, 84, 84), 2, nn.Linear) == [(100, 16_000), (2, 100)]
    assert count("wkafl-celeba", (3, 84, 84), 2) == 490 + 1_600_100 + 202


@pytest.mark.parametrize("name", ["resnet18-bn", "resnet18-gn"])
def test_resnet_18(name):
    # He et al. (2016), Table 1: conv2_x to conv5_x have two blocks of two 3x3 convolutions each, of 64 to 512
    # channels; the stem is 3x3, as in their section 4.2 on CIFAR-10.
    convolutions = sizes(name, CIFAR, 10, nn.Conv2d)
    assert [shape for shape in convolutions if shape[2:] == (1, 1)] == [
        (128, 64, 1, 1),
        (256, 128, 1, 1),
        (512, 256, 1, 1),
    ]
    assert len(convolutions) == 1 + 16 + 3
    assert sizes(name, CIFAR, 10, nn.Linear) == [(10, 512)]
    assert count(name, CIFAR, 10) == 11_173_962
    assert count(name, CIFAR, 100) == 11_173_962 + 90 * 513


def test_char_lstm():
    # Anarchic FL, appendix E.1: "a two-layer LSTM classifier containing 100 hidden units ... embeds each of the
    # characters into a learned 8-dimensional space", 80 classes. torch has two biases a gate where LEAF has one.
    module = build_model("char-lstm", TEXT, 80, 0)
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert found.pop("embedding.weight") == (80, 8)
    assert found.pop("output.weight") == (80, 100)
    assert found.pop("output.bias") == (80,)
    assert found["lstm.weight_ih_l0"] == (400, 8)
    assert found["lstm.weight_ih_l1"] == found["lstm.weight_hh_l0"] == found["lstm.weight_hh_l1"] == (400, 100)
    assert len(found) == 8
    assert count("char-lstm", TEXT, 80) == 640 + 44_000 + 80_800 + 8_080
    windows = torch.randint(80, (5, 80), generator=torch.Generator().manual_seed(0))
    scores = module(windows)
    assert scores.shape == (5, 80)
    # The first character of the window reaches the scores through 80 steps, and each row depends on its window only.
    assert torch.equal(module(windows)[1:], scores[1:])
    changed = windows.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 80
    assert not torch.equal(module(changed)[0], scores[0])


def example_batch(name, count):
    shape = SHAPES.get(name, CIFAR)
    source = torch.Generator().manual_seed(1)
    if shape == TEXT:
        return torch.randint(80, (count, *shape), generator=source)
    return torch.randn(count, *shape, generator=source)


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_depend_on_the_seed_alone(name):
    shape = SHAPES.get(name, CIFAR)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    built = [build_model(name, shape, 80, seed) for seed in (0, 0, 1, generator(0))]
    assert torch.equal(torch.get_rng_state(), before)
    states = [torch.cat([value.flatten().double() for value in module.state_dict().values()]) for module in built]
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[3])
    assert not torch.equal(states[0], states[2])
    assert all(parameter.dtype == torch.float32 for parameter in built[0].parameters())
    assert all(parameter.requires_grad for parameter in built[0].parameters())


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_have_the_laws_of_torchs_layers(name):
    module = build_model(name, SHAPES.get(name, CIFAR), 80, 3)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(layer.weight[0].numel())
        elif isinstance(layer, nn.LSTM):
            bound = 1 / math.sqrt(layer.hidden_size)
        elif isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
            assert (layer.weight == 1).all()
            assert (layer.bias == 0).all()
            if isinstance(layer, nn.BatchNorm2d):
                assert (layer.running_mean == 0).all()
                assert (layer.running_var == 1).all()
                assert layer.num_batches_tracked == 0
            continue
        elif isinstance(layer, nn.Embedding):
            # 640 draws of N(0, 1): within five standard deviations of their mean and variance.
            assert abs(layer.weight.mean()) < 5 / math.sqrt(640)
            assert abs(layer.weight.var() - 1) < 5 * math.sqrt(2 / 640)
            continue
        else:
            assert not list(layer.parameters(recurse=False))
            continue
        for parameter in layer.parameters():
            assert parameter.abs().max() <= bound
        assert max(parameter.abs().max() for parameter in layer.parameters()) > 0.9 * bound


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_a_batch_and_learns_it(name):
    module = build_model(name, SHAPES.get(name, CIFAR), 80, 0)
    batch, labels = example_batch(name, 4), torch.arange(4)
    assert module(batch).shape == (4, 80)
    loss = nn.functional.cross_entropy(module(batch), labels)
    loss.backward()
    # Every parameter takes part, and a short step against the gradient makes the loss smaller.
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in module.parameters())
    torch.optim.SGD(module.parameters(), lr=1e-3).step()
    assert nn.functional.cross_entropy(module(batch), labels) < loss


def test_group_norm_does_not_depend_on_the_batch():
    images = example_batch("resnet18-gn", 3)
    for name, alike in (("resnet18-gn", True), ("resnet18-bn", False)):
        module = build_model(name, (3, 8, 8), 10, 0)
        together = module(images)[:2]
        difference = (module(images[:2]) - together).abs().max()
        assert bool(difference < 1e-4 * together.abs().max()) is alike


@pytest.mark.parametrize(("name", "start"), [("logreg", "b3519f5b37ae5cf0"), ("wkafl-cnn", "c825ad3b6b834ab1")])
def test_runs_keep_their_initial_values(name, start):
    """Older logs have them."""
    values = [p.detach().numpy().tobytes() for p in build_model(name, MNIST, 10, generator(5)).parameters()]
    assert hashlib.sha256(b"".join(values)).hexdigest().startswith(start)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("logreg", "mlp", "char-lstm")])
def test_images_that_are_too_small(name):
    check_refused(f"model '{name}' needs images of .* pixels or more, not 3x32", build_model, name, (3, 3, 32), 10, 0)
    check_refused(rf"model '{name}' needs images .*, not examples of shape \(80,\)", build_model, name, TEXT, 80, 0)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("logreg", "mlp", "char-lstm")])
def test_the_smallest_images(name):
    side = {"cnn": 4, "wkafl-celeba": 5, "resnet18-bn": 8, "resnet18-gn": 8}.get(name, 16)
    assert build_model(name, (1, side, side), 3, 0)(torch.zeros(2, 1, side, side)).shape == (2, 3)


def test_unknown_models_and_other_shapes():
    check_refused(r"unknown model 'resnet18'.*resnet18-bn", build_model, "resnet18", CIFAR, 10, 0)
    check_refused("needs windows of characters", build_model, "char-lstm", CIFAR, 10, 0)


def test_a_layer_without_a_law_of_initial_values(monkeypatch):
    monkeypatch.setitem(NETWORKS, "logreg", lambda name, shape, num_classes: nn.Bilinear(1, 1, 1))
    check_error("no initialisation for Bilinear", build_model, "logreg", MNIST, 10, 0, error=NotImplementedError)


def test_the_names_are_those_of_the_networks_and_known_without_torch():
    assert set(MODELS) == set(NETWORKS)
    code = "import sys; from afflux.sim.models import MODELS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
