"""Settings of runs: what is checked before a server is made."""

import numpy as np
import pytest

from afflux import AffluxError, Server
from afflux.integrations._core import TrainingRun
from afflux.integrations._settings import RunSettings, require_absolute_store
from afflux.rules import dp_fedbuff, fedbuff
from conftest import check_error
from core_runs import MODEL, run_of


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0, must be an int of at least 1"),
        ({"timeout": -1}, "timeout is -1, must be finite and positive"),
        ({"max_failures": 1.5}, "max_failures is 1.5"),
        ({"store": 3}, "store is 3, must be a folder's path"),
        ({"server_options": {"max_stalenes": 3}}, "did you mean 'max_staleness'"),
        ({"server_options": {"faults": "raise"}}, 'faults="raise" would end the run for one client'),
        ({"server_options": {"inplace": True}}, "inplace=True overwrites the version"),
        ({"server_options": [("log", True)]}, "must be a dict"),
    ],
)
def test_settings_are_checked(wrong, message):
    check_error(rf"\[settings(\.server_options)?\].*{message}", RunSettings, **wrong)


class Anything:
    """An object with an attribute of every name, such as Rngs of flax."""

    def __getattr__(self, name):
        return list


@pytest.mark.parametrize("model", [Anything(), [np.zeros(2)], {"a": {"b": np.zeros(2)}}])
def test_the_initial_model_is_a_module_or_arrays_by_name(model):
    check_error("initial model must be arrays by name", TrainingRun, fedbuff(), model, RunSettings(), num_clients=1)


def test_the_noise_key_of_a_file(tmp_path):
    rule, path = dp_fedbuff(buffer_size=2, noise_multiplier=1.0), tmp_path / "key"
    check_error("noise_key_file must be a file of 32 secret bytes", run_of, rule)
    check_error("noise_key_file cannot be read: .*key", run_of, rule, noise_key_file=path)
    path.write_bytes(bytes(31))
    check_error("noise_key must be 32 bytes", run_of, rule, noise_key_file=path)
    path.write_bytes(bytes(32))
    assert run_of(rule, noise_key_file=path).server.version == 0
    check_error("fedbuff adds no noise", run_of, noise_key_file=path)


def test_a_relative_store_is_refused_where_the_folder_may_change(tmp_path):
    for store in (None, tmp_path / "store"):
        require_absolute_store("run", RunSettings(store=store), "it runs elsewhere")
    with pytest.raises(AffluxError, match=r"\[run\] store is 'runs/1', must be an absolute path: it runs elsewhere"):
        require_absolute_store("run", RunSettings(store="runs/1"), "it runs elsewhere")


def test_a_stored_server_that_raises_for_faults_is_refused(tmp_path):
    Server(fedbuff(buffer_size=2), MODEL, store=tmp_path / "store").close()
    check_error('faults="raise"', run_of, store=tmp_path / "store")
    Server.open(tmp_path / "store").close()  # it is not locked


@pytest.mark.parametrize("wrong", [np.zeros(3, np.float32), {"a": {"w": np.zeros(3, np.float32)}}, 3, None])
def test_a_model_that_is_no_arrays_by_name_leaves_no_store(tmp_path, wrong):
    with pytest.raises(AffluxError):
        TrainingRun(fedbuff(buffer_size=2), wrong, RunSettings(store=tmp_path / "store"), num_clients=2)
    assert not (tmp_path / "store").exists()
