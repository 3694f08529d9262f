"""Delay laws, partitions and data sets: their laws, and that nothing global is touched."""

import math

import numpy as np
import pytest

from afflux.sim.data import image_set, read_data_set
from afflux.sim.workload.delays import delay_law, fadas_classes
from afflux.sim.workload.partitions import BY_CLASSES, PARTITIONS, classes, dirichlet, iid, wkafl
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from conftest import check_refused, generator


def test_streams_differ_by_seed_purpose_and_key_and_are_repeatable():
    keys = [
        (0, StreamPurpose.BATCHES, 0),
        (0, StreamPurpose.BATCHES, 1),
        (0, StreamPurpose.MODEL),
        (1, StreamPurpose.MODEL),
    ]
    draws = [random_stream(*key).integers(2**62) for key in keys]
    assert len(set(draws)) == len(keys)
    assert draws == [random_stream(*key).integers(2**62) for key in keys]
    # A seed's results depend on these numbers.
    assert [*StreamPurpose.__members__.values()] == [*range(11), *range(20, 26)]


@pytest.mark.parametrize(("name", "large"), [("fadas-large", (50, 80)), ("fadas-mild", (5, 8))])
def test_fadas_supports(name, large):
    intervals = np.array([(1, 2), (3, 5), large])
    classes = fadas_classes(200, generator(3))
    delay = delay_law(name)(200, generator(3))
    times = generator(4)
    draws = np.array([[delay(client, times) for _ in range(50)] for client in range(200)])
    low, high = intervals[classes].T[:, :, None]
    assert ((draws >= low) & (draws <= high)).all()
    for group in range(3):
        values, (low, high) = draws[classes == group], intervals[group]
        # Not only inside: over the whole interval, and drawn again at each dispatch.
        assert values.min() < low + 0.1 * (high - low)
        assert values.max() > high - 0.1 * (high - low)
        assert (values.std(axis=1) > 0.1 * (high - low)).all()


def test_constant_and_exponential_delays():
    times = generator()
    assert delay_law("constant")(3, generator())(2, times) == 1.0
    delay = delay_law("exponential")(3, generator())
    draws = [delay(0, times) for _ in range(20_000)]
    assert min(draws) > 0
    assert np.mean(draws) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - set(BY_CLASSES)))
@pytest.mark.parametrize("num_clients", [1, 7, 100, 3000])
def test_a_partition_covers_every_sample_exactly_once(name, num_clients):
    labels = generator(1).integers(0, 10, size=1198)
    shards = PARTITIONS[name](labels, num_clients, 0.1, generator(2))
    assert len(shards) == num_clients
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(1198))
    assert all(np.array_equal(shard, np.sort(shard)) for shard in shards)


def test_dirichlet_shares_have_the_laws_mean_and_variance():
    labels = np.zeros(1000, dtype=np.int64)
    shares = np.array([len(dirichlet(labels, 5, 0.5, generator(s))[0]) for s in range(2000)]) / 1000
    # One share of Dirichlet(.5 x 5) is Beta(.5, 2): mean 1/5, variance (1/5)(4/5)/(5 * .5 + 1).
    assert shares.mean() == pytest.approx(0.2, abs=0.03)
    assert shares.var() == pytest.approx(0.16 / 3.5, rel=0.1)


def test_dirichlet_divides_each_class_at_the_cumulated_shares():
    class Fixed:
        def permutation(self, members):
            return members

        def dirichlet(self, alpha):
            assert alpha.tolist() == [0.3] * 4
            return np.array([0.25, 0.0, 0.5, 0.25])

    labels = np.array([0] * 8 + [1] * 4 + [2] * 3)
    shards = dirichlet(labels, 4, 0.3, Fixed())
    assert [shard.tolist() for shard in shards] == [[0, 1, 8, 12], [], [2, 3, 4, 5, 9, 10, 13], [6, 7, 11, 14]]


def test_alpha_sets_the_heterogeneity():
    labels = np.repeat(np.arange(10), 120)

    def classes_per_client(alpha):
        shards = dirichlet(labels, 20, alpha, generator(3))
        return np.mean([len(set(labels[shard])) for shard in shards if len(shard)])

    assert classes_per_client(0.1) < 5
    assert classes_per_client(100) > 9.5


def test_dirichlet_leaves_some_clients_without_data():
    labels = np.repeat(np.arange(10), 120)
    assert any(len(shard) == 0 for shard in dirichlet(labels, 100, 0.05, generator(0)))


def test_iid_sizes_differ_by_one_at_most():
    shards = iid(np.zeros(1198), 100, 0.1, generator())
    assert {len(shard) for shard in shards} == {11, 12}
    assert min(np.ptp(shard) for shard in shards) > 100  # drawn from the whole file


@pytest.mark.parametrize(("num_clients", "count"), [(10, 1), (10, 2), (7, 3), (20, 5), (10, 10)])
def test_classes_gives_each_client_as_many_samples_of_so_many_classes(num_clients, count):
    labels = generator(1).integers(0, 10, size=5000)
    shards = classes(labels, num_clients, count, generator(2))
    owned = np.concatenate(shards)
    assert len(np.unique(owned)) == len(owned), "without replacement"
    assert all(np.array_equal(shard, np.sort(shard)) for shard in shards)
    counts = np.array([np.bincount(labels[shard], minlength=10) for shard in shards])
    # So many classes each, the same number of samples of each; no class has two takers more than another one.
    assert ((counts > 0).sum(axis=1) == count).all()
    (size,) = set(counts[counts > 0])
    takers = (counts > 0).sum(axis=0)
    assert takers.max() - takers.min() <= 1
    # The rarest class of all is used up, but for a rest that cannot be divided.
    assert size == min(np.bincount(labels)[k] // takers[k] for k in range(10) if takers[k])


def test_classes_are_drawn_by_the_stream_and_uniformly():
    labels = np.repeat(np.arange(10), 30)
    first = [tuple(sorted(set(labels[classes(labels, 2, 2, generator(seed))[0]]))) for seed in range(9000)]
    assert first[:20] == [tuple(sorted(set(labels[classes(labels, 2, 2, generator(s))[0]]))) for s in range(20)]
    counts = np.unique(first, axis=0, return_counts=True)[1]
    # 45 equally likely pairs; 5 standard deviations of a binomial count.
    assert len(counts) == 45
    assert np.abs(counts - 200).max() < 5 * math.sqrt(200)


def test_wkafl_sizes_classes_and_weights_have_their_laws():
    labels = np.repeat(np.arange(10), 200)
    shards = wkafl(labels, 4000, 2, generator(4))
    sizes = np.array([len(shard) for shard in shards])
    assert (sizes.min(), sizes.max()) == (10, 49)
    assert np.bincount(sizes)[10:].min() > 50, "40 sizes, 100 clients each"
    assert all(len(np.unique(shard)) == len(shard) for shard in shards)
    assert len(np.unique(np.concatenate(shards))) == 2000, "clients overlap, and nothing is left out"
    counts = np.array([np.bincount(labels[shard], minlength=10) for shard in shards])
    assert (counts > 0).sum(axis=1).max() == 2
    # w1 / (w1 + w2) has the median 1/2 and P(< 1/4) = P(3 w1 < w2) = 1/6.
    share = np.array([row[row > 0][0] / row.sum() for row in counts[sizes > 30]])
    assert abs((share < 0.25).mean() - 1 / 6) < 5 * math.sqrt(5 / 36 / len(share)) + 0.01
    assert abs((share < 0.5).mean() - 1 / 2) < 5 * math.sqrt(1 / 4 / len(share)) + 0.01


@pytest.mark.parametrize("name", BY_CLASSES)
@pytest.mark.parametrize("count", [0, 11, 1.5])
def test_impossible_numbers_of_classes_are_refused(name, count):
    check_refused("whole number from 1 to 10", PARTITIONS[name], np.arange(10), 1, count, generator())


def test_too_many_clients_for_the_samples_are_refused():
    check_refused("too few samples for 30 clients with 10", classes, np.repeat(np.arange(10), 20), 30, 10, generator())


def test_digits_are_standardised_and_split_in_every_class():
    task = read_data_set("digits")
    x_train, x_test = task.scaled()
    assert task.shape == (1, 8, 8)
    assert len(task.y_train) + len(task.y_test) == 1797
    assert len(task.y_test) == pytest.approx(1797 / 3, abs=5)
    assert x_train.mean() == pytest.approx(0, abs=1e-5)
    assert x_train.std() == pytest.approx(1, abs=1e-5)
    for label in range(10):
        share = (task.y_test == label).sum() / ((task.y_test == label).sum() + (task.y_train == label).sum())
        assert share == pytest.approx(1 / 3, abs=0.01)
    images = np.concatenate([x_train, x_test]).reshape(1797, -1)
    from sklearn.datasets import load_digits  # slow to import, and no other test of this file needs it

    originals, labels = load_digits(return_X_y=True)
    for array, expected in zip(image_set.digits_of_scikit_learn(), (originals, labels), strict=True):
        assert array.dtype == expected.dtype
        assert np.array_equal(array, expected)
    # Back on the original scale: the same images, each as often as there.
    low, high = images.min(), images.max()
    restored = np.rint((images - low) * (16 / (high - low)))
    assert np.array_equal(np.sort(restored, axis=0), np.sort(originals, axis=0))


def test_digits_that_cannot_be_read_are_named(monkeypatch):
    monkeypatch.setattr(np, "loadtxt", lambda path, delimiter: float("x"))
    check_refused(r"cannot read the digits .*digits\.csv\.gz: could not", image_set.digits_of_scikit_learn)


def test_mnist_is_read_from_a_folder_and_its_absence_explained(tmp_path, monkeypatch):
    monkeypatch.delenv("AFFLUX_DATA", raising=False)
    check_refused("AFFLUX_DATA", read_data_set, "mnist")
    check_refused(r"mnist\.npz", read_data_set, "mnist", tmp_path)
    arrays = {"x_train": generator().integers(0, 256, (20, 28, 28), dtype=np.uint8)}
    np.savez(tmp_path / "mnist.npz", **arrays)
    check_refused("no array y_train, x_test, y_test", read_data_set, "mnist", tmp_path)
    arrays |= {"y_train": np.arange(20, dtype=np.uint8) % 10}
    arrays |= {"x_test": arrays["x_train"][:5], "y_test": arrays["y_train"][:5]}
    np.savez(tmp_path / "mnist.npz", **arrays)
    monkeypatch.setenv("AFFLUX_DATA", str(tmp_path))
    task = read_data_set("mnist")
    assert task.shape == (1, 28, 28)
    assert task.y_train.tolist() == [*range(10), *range(10)]
    assert np.array_equal(task.x_test, task.x_train[:5])
