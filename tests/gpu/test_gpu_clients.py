"""Clients that train on a GPU: two rounds of ResNet-18 beside those on the CPU."""

import numpy as np
import pytest

from afflux.rules.specs import parse_rule
from afflux.sim.workload.config import SimConfig

torch = pytest.importorskip("torch")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch finds none for clients")


@needs_cuda
def test_two_rounds_of_resnet_18_on_a_gpu(tmp_path):
    from afflux.lab.results.finished_runs import Job
    from afflux.lab.runs.compare import compare

    rng = np.random.default_rng(0)
    labels = np.arange(200) % 10
    images = (rng.integers(0, 100, (200, 32, 32, 3)) + 15 * labels.reshape(-1, 1, 1, 1)).astype(np.uint8)
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels, x_test=images[:40], y_test=labels[:40])
    settings = {"task": "papers:dataset=cifar10:network=resnet18-bn", "data_dir": str(tmp_path), "num_clients": 4}
    settings |= {"concurrency": 4, "refill": 2, "arrivals": 4, "eval_every": 2, "alpha": 100.0, "batch_size": 8}
    jobs = [
        Job(parse_rule("fadas:buffer_size=2"), 0, config=SimConfig(**settings, local_steps=2, device=device))
        for device in ("cpu", "cuda", "cuda")
    ]
    on_cpu, on_gpu, again = compare(jobs, SimConfig())
    assert [row.version for row in on_gpu.evaluations] == [0, 1, 2]
    for ours, theirs in zip(on_cpu.evaluations, on_gpu.evaluations, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=0.05)
    assert (on_cpu.clients == on_gpu.clients).all()
    assert np.allclose(on_gpu.params, again.params, atol=1e-4)
    assert torch.cuda.max_memory_allocated() > 4 * len(on_gpu.params)
