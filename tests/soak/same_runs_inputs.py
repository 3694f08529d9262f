"""Small data sets in each format, and short commands, for `same_runs.py`; as a program, it runs these commands."""

import gzip
import json
import runpy
import struct
import sys
from pathlib import Path

import numpy as np

IMAGES = "--num-clients 4 --concurrency 2 --arrivals 4 --eval-every 2 --local-steps 1 --batch-size 4 --partition iid"
OWNERS = "--concurrency 2 --arrivals 4 --eval-every 2 --local-steps 1 --batch-size 4"
DIGITS = "--model logreg --num-clients 12 --concurrency 4 --arrivals 30 --eval-every 10"
LAWS = "constant exponential fadas-large:gamma=0.5 ca2fl ca2fl-1 ca2fl-0.5 ca2fl-fixed"


def _tasks(words: str, options: str) -> dict[str, str]:
    """Return the runs of words DATA/NETWORK/FORM, with these further options."""
    tasks = [word.split("/") for word in words.split()]
    return {
        f"{data}-{network}-{form}": f"--task papers:dataset={data}:network={network} --data-dir data/{form} {options}"
        for data, network, form in tasks
    }


#: Arguments of `afflux run --rule fedbuff:buffer_size=2`, by the name of the run folder.
RUNS = {
    **_tasks("mnist/mlp/idx fashion-mnist/logreg/idx emnist-balanced/wkafl-cnn/idx emnist-letters/logreg/npz", IMAGES),
    **_tasks("cifar10/lenet5/npz cifar10/afl-cnn/bin cifar10/ca2fl-cnn/npz cifar100/fadas-cnn/npz", IMAGES),
    **_tasks("cifar100/resnet18-bn/bin cifar100/resnet18-gn/npz", IMAGES),
    **_tasks("femnist/wkafl-cnn/leaf", OWNERS),
    **_tasks("shakespeare/char-lstm/leaf shakespeare/char-lstm/table", OWNERS),
    "images-mnist-wkafl-cnn": f"--data mnist --model wkafl-cnn --data-dir data/npz {IMAGES}",
    "images-mnist-cnn": f"--data mnist --model cnn --data-dir data/npz {IMAGES}",
    **{f"delays-{number}": f"{DIGITS} --delays {law}" for number, law in enumerate(LAWS.split())},
    **{
        name: f"{DIGITS} {options}"
        for name, options in {
            "iid": "--partition iid --batch-size 8 --local-epochs 1 --drop-last",
            "classes": "--partition classes --classes 3 --weight-decay 0.01",
            "by-wkafl": "--partition wkafl --classes 2 --examples batch",
            "fedprox": "--client-optimizer fedprox --mu 0.5 --steps-law uniform",
            "rounds": "--rounds 4 --clip-norms 1",
            "virtual-time": "--virtual-time 60 --refill 3",
            "target": "--target 0.2 --stop-at-target --part validation",
        }.items()
    },
    "protocol": "--model logreg --num-clients 12 --arrivals 30 --eval-every 10 --protocol rounds --stale-models 1",
    "faults": "--task own.py:faulty --num-clients 1000 --concurrency 4 --arrivals 40 --eval-every 20",
}


def write_data(folder: Path) -> None:
    """Write each data set, and the files of two laws of delays."""
    rng = np.random.default_rng(0)
    grey = _parts(rng, (28, 28), 26)
    colour = _parts(rng, (3, 32, 32), 10)
    (folder / "npz").mkdir(parents=True)
    archives = {"mnist": _parts(rng, (28, 28), 10), "emnist-letters": grey, "cifar10": colour, "cifar100": colour}
    for name, parts in archives.items():
        (x, y), (x_test, y_test) = parts
        np.savez(folder / "npz" / f"{name}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    for place, prefixes, suffix in (
        ("MNIST/raw", ("train", "t10k"), ""),
        ("fashion-mnist", ("train", "t10k"), ".gz"),
        ("emnist", ("emnist-balanced-train", "emnist-balanced-test"), ".gz"),
    ):
        (folder / "idx" / place).mkdir(parents=True)
        for prefix, (images, labels) in zip(prefixes, _parts(rng, (28, 28), 10), strict=True):
            for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
                content = _idx(array)
                path = folder / "idx" / place / f"{prefix}-{kind}-ubyte{suffix}"
                path.write_bytes(gzip.compress(content, mtime=0) if suffix else content)
    batches = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for place, names, coarse in (("cifar-10-batches-bin", batches, 0), ("cifar-100-binary", ["train", "test"], 1)):
        (folder / "bin" / place).mkdir(parents=True)
        for name in names:
            (images, labels), _ = _parts(rng, (3, 32, 32), 10)
            columns = [labels[:, None].astype(np.uint8)] * (1 + coarse)
            content = np.hstack([*columns, images.reshape(len(images), -1)]).tobytes()
            (folder / "bin" / place / f"{name}.bin").write_bytes(content)
    _write_texts(folder, rng)
    starts = [(device, 10 * number + device) for device in range(5) for number in range(20)]
    lines = [f"{device},{start},{start + 4}" for device, start in starts]
    (folder / "ready.csv").write_text("\n".join(["device,from,to", *lines, ""]))


def _write_texts(folder: Path, rng: np.random.Generator) -> None:
    speeches = [["".join(rng.choice(list("abcdef,.!"), size)) for size in (260, 260, 260, 260, 40)] for _ in range(3)]
    texts = [one[0] for one in speeches]
    for part, count in (("train", 6), ("test", 3)):
        pixels = {
            f"writer {user}": {"x": rng.random((count, 784)).round(3).tolist(), "y": list(range(user, user + count))}
            for user in range(3)
        }
        windows = {
            f"role {user}": {"x": [text[i : i + 80] for i in range(count)], "y": [text[i + 80] for i in range(count)]}
            for user, text in enumerate(texts)
        }
        for name, data in (("femnist", pixels), ("shakespeare", windows)):
            path = folder / "leaf" / name / part / "a.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps({"users": list(data), "num_samples": [count] * len(data), "user_data": data}))
    (folder / "table").mkdir()
    lines = [f"play\trole {number}\t{speech}" for number, role in enumerate(speeches) for speech in role]
    (folder / "table" / "shakespeare_speeches.tsv").write_text("\n".join(["play\tspeaker\ttext", *lines]))


def _parts(rng: np.random.Generator, shape: tuple[int, ...], num_classes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return random images and labels of a training and a test part."""
    return [
        (rng.integers(0, 256, (count, *shape), dtype=np.uint8), rng.integers(0, num_classes, count))
        for count in (24, 8)
    ]


def _idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def main() -> int:
    """Run the commands of `RUNS` in this process; the folder of a command is its name, below short/."""
    for name, options in RUNS.items():
        sys.argv = ["afflux", "run", "--rule", "fedbuff:buffer_size=2", *options.split(), "--out", f"short/{name}"]
        try:
            runpy.run_module("afflux", run_name="__main__")
        except SystemExit as end:
            if end.code:
                print(f"{name} ends with {end.code}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
