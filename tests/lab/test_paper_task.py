"""The papers' data sets and models in the event simulator: runs of two server steps on small generated files."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import own_tasks
from afflux.lab.tasks.augmentation import randaugment
from afflux.lab.tasks.registry import build_task
from afflux.rules.specs import parse_rule
from afflux.sim.clients.batches import take
from afflux.sim.workload.config import SimConfig
from conftest import check_refused
from made_runs import run
from pairwise import soak


def write_images(folder, name, shape, num_classes):
    rng = np.random.default_rng(0)
    labels = np.arange(120) % num_classes
    # Each class has its own mean, so that there is something to learn.
    images = rng.integers(0, 100, (120, *shape)) + (labels * (150 // num_classes)).reshape(-1, *[1] * len(shape))
    images = images.astype(np.uint8)
    np.savez(folder / f"{name}.npz", x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])


#: Settings of a data set that its owners divide.
OWNERS = {"num_clients": SimConfig.num_clients, "alpha": SimConfig.alpha, "concurrency": 2}


def config(folder, dataset, network, **settings):
    given = {"num_clients": 6, "concurrency": 4, "arrivals": 6, "eval_every": 3, "alpha": 10.0, "batch_size": 8}
    return SimConfig(
        task=f"papers:dataset={dataset}:network={network}", data_dir=str(folder), delays="ca2fl", **(given | settings)
    )


@pytest.mark.parametrize(
    ("dataset", "network", "shape"),
    [
        ("mnist", "logreg", (28, 28)),
        ("fashion-mnist", "lenet5", (28, 28)),
        ("emnist-mnist", "wkafl-cnn", (28, 28)),
        ("cifar10", "ca2fl-cnn", (32, 32, 3)),
        *soak("cifar100", "resnet18-bn", (32, 32, 3)),  # in test_paper_presets.py, too
    ],
)
def test_runs_on_images(tmp_path, dataset, network, shape):
    write_images(tmp_path, dataset, shape, 100 if dataset == "cifar100" else 10)
    settings = config(tmp_path, dataset, network, local_steps=1)
    result = run(parse_rule("ca2fl:buffer_size=3"), 0, settings)
    assert [evaluation.version for evaluation in result.evaluations] == [0, 1, 2]
    assert np.isfinite(result.params).all()
    again = run(parse_rule("ca2fl:buffer_size=3"), 0, settings)
    assert np.array_equal(again.params, result.params)


def test_augmented_images(tmp_path):
    """They are crops of the padded images, perhaps flipped, and then standardised; torch's numbers draw them."""
    write_images(tmp_path, "cifar10", (32, 32, 3), 10)
    plain = config(tmp_path, "cifar10", "logreg", local_steps=1)
    augmented = replace(plain, task=f"{plain.task}:augment=crop-flip")
    (images, *_), (own, *_) = (build_task(one).data_for_seed(0) for one in (augmented, plain))
    torch.manual_seed(1)
    ((image,), (label,)), ((again,), _) = images.batch([0]), images.batch([0])
    assert label == own[1][0]
    assert not torch.equal(image, again)
    more = replace(images, kind="randaugment")  # a batch at once draws the numbers of one image after the other
    torch.manual_seed(2)
    single = [more.batch([place]) for place in range(9)]
    torch.manual_seed(2)
    batch, labels = take(more, np.arange(9))
    assert torch.equal(batch, torch.cat([one for one, _ in single]))
    assert torch.equal(labels, torch.cat([label for _, label in single]))
    torch.manual_seed(3)
    made, _ = images.batch([*range(9)])
    torch.manual_seed(3)
    for place in range(9):
        (top, left), flip = torch.randint(0, 9, (2,)), torch.randint(0, 2, ())
        whole = torch.nn.functional.pad(images.x[place], (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        expected = ((whole.flip(2) if flip else whole) - images.moments[0]) / images.moments[1]
        assert torch.equal(made[place], expected), "the draws of the finished runs"
    tuned, own = (build_task(replace(one, part="validation")) for one in (augmented, plain))
    assert torch.allclose(tuned.evaluate.x, own.evaluate.x, atol=1e-6)
    assert [*map(len, tuned.data_for_seed(0))] == [len(y) for _, y in own.data_for_seed(0)]
    results = [run(parse_rule("ca2fl:buffer_size=3"), 0, one) for one in (augmented, augmented, plain)]
    assert results[0].digest == results[1].digest != results[2].digest
    full = run(parse_rule("ca2fl:buffer_size=3"), 0, replace(plain, task=f"{plain.task}:augment=randaugment"))
    assert full.digest not in {result.digest for result in results}


def test_every_operation_of_randaugment():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    outcomes = [np.array(randaugment(Image.fromarray(pixels), which, sign)) for which in range(14) for sign in (1, -1)]
    assert {outcome.shape for outcome in outcomes} == {pixels.shape}
    assert (outcomes[0] == pixels).all()
    assert len({outcome.tobytes() for outcome in outcomes}) == 1 + 9 * 2 + 3, "autocontrast finds all values there"
    assert (outcomes[6][:, :-7] == pixels[:, 7:]).all(), "a shift by seven pixels"


@pytest.mark.parametrize(
    ("dataset", "options", "more", "message"),
    [
        ("cifar10", "augment=mix", {}, "unknown augment 'mix'"),
        ("cifar10", "augment=crop-flip:inputs=unit", {}, "augment needs images without owners"),
        ("mnist", "augment=crop-flip", {}, "images of mnist have 1 channels, not 3"),
    ],
)
def test_what_cannot_be_augmented(dataset, options, more, message, tmp_path):
    write_images(tmp_path, dataset, (28, 28) if dataset == "mnist" else (32, 32, 3), 10)
    settings = config(tmp_path, dataset, "logreg", **more)
    check_refused(message, build_task, replace(settings, task=f"{settings.task}:{options}"))


def test_a_run_learns(tmp_path):
    write_images(tmp_path, "mnist", (28, 28), 3)
    settings = config(tmp_path, "mnist", "mlp", arrivals=60, local_steps=4, client_lr=0.05)
    result = run(parse_rule("fedbuff:buffer_size=3"), 0, settings)
    assert result.final_accuracy > 0.9


def write_leaf(folder, users):
    folder.mkdir(parents=True)
    content = {"users": list(users), "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()}}
    (folder / "all.json").write_text(json.dumps(content))


def test_a_writer_is_a_client(tmp_path):
    rng = np.random.default_rng(0)
    examples = [(rng.random((5 + n, 784)).round(3).tolist(), [n] * (5 + n)) for n in range(4)]
    write_leaf(tmp_path / "femnist" / "train", {f"f{n}": own for n, own in enumerate(examples)})
    write_leaf(tmp_path / "femnist" / "test", {"f0": examples[0], "only-test": examples[1]})
    settings = config(tmp_path, "femnist", "wkafl-cnn", **OWNERS)
    task = build_task(settings)
    clients = task.data_for_seed(0)
    assert len(clients) == 4, "a writer without training examples is none"
    assert [clients[n][1].tolist() for n in range(4)] == [[n] * (5 + n) for n in range(4)]
    assert run(parse_rule("fedbuff:buffer_size=2"), 0, settings).final_accuracy >= 0


def test_the_settings_data_and_model_take_each_data_set_without_owners(tmp_path):
    write_images(tmp_path, "fashion-mnist", (28, 28), 10)
    settings = config(tmp_path, "fashion-mnist", "mlp", local_steps=1)
    same = replace(settings, task="images", data="fashion-mnist", model="mlp")
    rule = parse_rule("fedbuff:buffer_size=3")
    assert run(rule, 0, same).digest == run(rule, 0, settings).digest
    digits = replace(settings, task="papers:dataset=digits:network=cnn", data_dir=None)
    assert run(rule, 0, digits).digest == run(rule, 0, replace(digits, task="images")).digest
    check_refused("unknown data 'femnist'", replace, same, data="femnist")


def test_a_role_is_a_client(tmp_path):
    own_tasks.write_speeches(tmp_path, {role: [f"The same words {role} again and again."] * 40 for role in "ABC"})
    settings = config(tmp_path, "shakespeare", "char-lstm", client_lr=0.5, **OWNERS)
    for name, value in (("partition", "iid"), ("alpha", 0.3), ("num_clients", 4)):
        other = replace(settings, **{name: value} | ({"alpha": 0.1} if name == "partition" else {}))
        check_refused(f"{name} is {value}, which is read only with a data set without owners", build_task, other)
    build_task(replace(settings, num_clients=3))  # as the log of a run says
    windows, targets = build_task(settings).data_for_seed(0)[1]
    assert windows.shape == (len(targets), 80)
    result = run(parse_rule("fedbuff:buffer_size=2"), 0, settings)
    assert result.evaluations[-1].loss < np.log(80)


def test_a_text_without_a_test_part(tmp_path):
    own_tasks.write_speeches(tmp_path, {"A": ["one speech " * 100]})
    check_refused("'shakespeare' has no test part", build_task, config(tmp_path, "shakespeare", "char-lstm", **OWNERS))


def test_delays_with_options(tmp_path):
    write_images(tmp_path, "mnist", (28, 28), 10)
    settings = replace(config(tmp_path, "mnist", "logreg"), delays="ca2fl-fixed:s=1e9")
    assert run(parse_rule("fedbuff:buffer_size=3"), 0, settings).evaluations[-1].virtual_time > 1e9
    check_refused("unknown option of delays fadas-mild: 'gama'", replace, settings, delays="fadas-mild:gama=1")


def test_what_does_not_go_together(tmp_path):
    write_images(tmp_path, "mnist", (28, 28), 10)
    for text, message in (
        ("dataset=mnits", "unknown data 'mnits'"),
        ("dataset=mnist:network=resnet", "unknown model 'resnet'"),
        ("dataset=mnist:network=char-lstm", "needs windows of characters"),
        ("dataset=cifar10", "has none of"),
        ("data_set=mnist", "unknown option of papers: 'data_set'"),
    ):
        check_refused(message, build_task, SimConfig(task=f"papers:{text}", data_dir=str(tmp_path)))


def test_ca2fls_cnn_learns_cifar_10_itself():
    folder = os.environ.get("AFFLUX_DATA")
    if not folder or not (Path(folder) / "cifar10" / "test_batch.npz").is_file():
        pytest.skip("needs cifar10/data_batch_1.npz ... test_batch.npz in the folder AFFLUX_DATA")
    settings = SimConfig(
        task="papers:dataset=cifar10:network=ca2fl-cnn",
        data_dir=folder,
        delays="ca2fl",
        num_clients=10,
        concurrency=4,
        alpha=100.0,
        arrivals=24,
        eval_every=24,
        local_steps=25,
        batch_size=50,
        client_lr=0.05,
    )
    # Chance is .1, with a standard deviation of .003 over 10000 images.
    assert run(parse_rule("ca2fl:buffer_size=2"), 0, settings).final_accuracy > 0.25
