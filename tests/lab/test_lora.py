"""LoRA: a small random transformer in a local checkpoint folder, whose adapters alone are trained and pushed."""

import socket
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from afflux import Layout, Server
from afflux.cli.lab.app import app
from afflux.lab import read_audit_log
from afflux.lab.presets.registry import all_presets
from afflux.lab.results import run_folder
from afflux.lab.runs.setup import RunSetup
from afflux.lab.tasks import lora_task
from afflux.lab.tasks.registry import build_task
from afflux.ops.errors import ConfigError
from afflux.rules import fedasync
from afflux.rules.specs import parse_rule
from afflux.sim.workload.config import SimConfig
from conftest import check_error, check_raises, check_refused
from made_runs import audit_folder, paused_run, resume, run, run_in_store
from pairwise import soak
from stopped_runs import Stopped, stop_at

# The libraries warn of their own later versions.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
#: Each data set, and each method. The others run in soak; test_paper_presets.py has the settings of all of them.
OF_EACH_KIND = ["fadas-rte-fedasync", "fadas-mrpc-fedbuff", "fadas-sst2", "fadas-rte-da"]
PRESETS = [name for name, preset in all_presets().items() if preset.model == "lora"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "a"]
HIDDEN = 16
#: A (rank 1) and B at the query and value projections of one layer.
ADAPTERS = 2 * 2 * HIDDEN
SMALL = ["--num-clients", "4", "--concurrency", "3", "--refill", "1", "--batch-size", "4", "--rounds", "2"]


@pytest.fixture(scope="module", autouse=True)
def attempts():
    """What the tests have tried to reach: they fail if it is anything, even in a thread of a library."""
    found = []

    def refused(*arguments, **options):
        found.append(arguments)
        # No Exception, so that no library handles it, and tries again.
        pytest.fail(f"a test must not reach {arguments}")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (socket, "getaddrinfo"),
            (socket, "create_connection"),
            (socket.socket, "connect"),
            (socket.socket, "connect_ex"),
        ):
            patch.setattr(owner, name, refused)
        yield found
        assert not found


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """GLUE's folders, and BERT's with random weights."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder = tmp_path_factory.mktemp("glue")
    checkpoint = folder / "bert-base-uncased"
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(checkpoint)
    (checkpoint / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(checkpoint / "vocab.txt")).save_pretrained(checkpoint)
    for name, header, lines in (
        (
            "RTE",
            "index\tsentence1\tsentence2\tlabel",
            ["0\tthe film\tgood\tentailment", "1\ta film\tbad\tnot_entailment"],
        ),
        ("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ["1\t1\t2\tgood film\tgood", "0\t3\t4\tgood\tbad"]),
        ("SST-2", "sentence\tlabel", ["the good film\t1", "a bad film\t0"]),
    ):
        (folder / name).mkdir()
        (folder / name / "train.tsv").write_text("\n".join([header, *lines * 10, ""]))
        (folder / name / "dev.tsv").write_text("\n".join([header, *lines * 2, ""]))
    return folder


def test_the_packages_of_the_extra_are_named(data_dir, monkeypatch):
    monkeypatch.setattr(lora_task, "find_spec", lambda name: None)
    check_refused(r"LoRA needs transformers, peft: pip install 'afflux\[lab,lora\]'", build_task, settings(data_dir))


def settings(data_dir, **others):
    given = {"num_clients": 4, "concurrency": 3, "arrivals": 9, "eval_every": 3, "batch_size": 4, "alpha": 10.0}
    given |= {"task": "lora:dataset=sst2:length=8", "client_lr": 0.5}
    return SimConfig(data_dir=str(data_dir), delays="fadas-mild", **(given | others))


SPEC = parse_rule("fadas:buffer_size=3:server_lr=0.05")


OPTIONS = [{}, {"modules_to_save": ["2"]}, {"bias": "lora_only"}, {"use_dora": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_names_of_adapters_are_those_of_peft(options):
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    def adapted():
        torch.manual_seed(0)
        base = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        return get_peft_model(base, LoraConfig(r=1, target_modules=["0"], **options))

    start, model = adapted(), adapted()
    adapters = get_peft_model_state_dict(start)
    trained = {name: array + 1 for name, array in adapters.items()}
    set_peft_model_state_dict(model, trained)
    trainable = Server(fedasync(alpha=1.0), start, layout=Layout.of(start, select="trainable"))
    for server in (trainable, Server(fedasync(alpha=1.0), adapters)):
        assert server.layout.size == sum(array.numel() for array in adapters.values())
        for version, pushed in enumerate((trained, model)):
            server.set_params(start)
            assert server.push(client=0, version=2 * version + 1, model=pushed).version == 2 * version + 2
            for out in (pulled := {name: torch.zeros_like(array) for name, array in adapters.items()}, adapted()):
                server.pull(out=out)
                arrays = out if out is pulled else get_peft_model_state_dict(out)
                assert arrays.keys() == trained.keys()
                assert all(torch.equal(array, trained[name]) for name, array in arrays.items())


def test_an_attempt_to_reach_a_model_hub_is_noticed(attempts):
    from transformers import AutoTokenizer

    assert not attempts
    check_error("must not reach", AutoTokenizer.from_pretrained, "bert-base-uncased", error=pytest.fail.Exception)
    assert "huggingface.co" in str(attempts)
    attempts.clear()


def test_adapters_alone_are_trained_and_pushed(data_dir):
    setup = RunSetup(settings(data_dir), 0)
    names = [field.name for field in setup.model.layout.fields]
    assert len(names) == 4
    assert all("lora_" in name for name in names)
    assert setup.model.layout.size == ADAPTERS == setup.new_server(SPEC).pull().params.size
    module = setup.model.module
    frozen = {name: tensor.clone() for name, tensor in module.named_parameters() if not tensor.requires_grad}
    client = setup.population.clients[0]
    result = setup.trainer.train(client, setup.model.initial_params, np.random.default_rng(0))
    assert result.update.shape == (ADAPTERS,)
    assert result.update.any()
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in module.named_parameters() if name in frozen)
    body = sum(tensor.numel() for tensor in frozen.values())
    assert body > 20 * ADAPTERS, "the body is not pushed"


def test_the_adapters_alone_learn(data_dir):
    result = run(SPEC, 0, settings(data_dir, arrivals=60, eval_every=60, local_steps=5))
    first, last = result.evaluations
    assert (first.accuracy, last.accuracy) == (0.5, 1.0), "one word decides the class"
    assert last.loss < first.loss


def test_the_head_is_an_option(data_dir):
    task = build_task(settings(data_dir, task="lora:dataset=sst2:head=true:rank=2"))
    trained = [name for name, tensor in task.model().named_parameters() if tensor.requires_grad]
    assert [name for name in trained if "lora_" not in name and "classifier" not in name] == []
    assert any("classifier" in name for name in trained)


def test_the_factor_of_the_adapters_is_alpha(data_dir):
    for rank in (1, 2):
        module = build_task(settings(data_dir, task=f"lora:dataset=sst2:rank={rank}:scale=8")).model()
        scalings = [part.scaling["default"] for part in module.modules() if hasattr(part, "lora_A")]
        assert scalings == [8.0, 8.0]


def test_equal_seeds_give_equal_bits_and_others_do_not(data_dir):
    one, again, other = (run(SPEC, seed, settings(data_dir)) for seed in (3, 3, 4))
    assert one.digest == again.digest != other.digest
    assert [evaluation.version for evaluation in one.evaluations] == [0, 1, 2, 3]
    assert np.isfinite(one.params).all()


@pytest.mark.parametrize("count", [1, 4, 8])
def test_resumes_bit_for_bit(data_dir, tmp_path, count):
    config = settings(data_dir)
    folder = run_folder.create_run_folder(tmp_path / "run")
    check_raises(Stopped, run_in_store, tmp_path / "store", SPEC, 3, config, audit_folder(folder), stop_at(count), 0.0)
    resumed = resume(paused_run(tmp_path / "store"))
    whole = run(SPEC, 3, config)
    assert resumed.digest == whole.digest
    assert resumed.evaluations == whole.evaluations


OTHERS = [name for name in PRESETS if name not in OF_EACH_KIND]


@pytest.mark.parametrize("name", [*OF_EACH_KIND, *(row for name in OTHERS for row in soak(name))])
def test_a_preset_makes_two_rounds(name, data_dir, tmp_path):
    preset = all_presets()[name]
    own = [] if preset.buffer_size is None else ["--buffer-size", "2"]
    command = ["run", "--paper", name, "--data-dir", data_dir, "--out", tmp_path / "out", *SMALL, *own, "--alpha", "10"]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    log = read_audit_log(next((tmp_path / "out" / "audit").glob("*.jsonl")))
    assert log.end.version == 2
    assert log.header.d == ADAPTERS + 2 * HIDDEN + 2, "adapters and the classification layer"
    assert log.header.client_lr == preset.settings["client_lr"].value


def test_errors_are_clear(data_dir, tmp_path):
    config = settings(data_dir)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    for task, message in (
        ("lora:dataset=cola", "unknown data 'cola'"),
        ("lora:dataset=sst2:checkpoint=bert-large", "nothing is downloaded"),
        ("lora:dataset=sst2:rank=0", "rank is 0, must be at least 1"),
        ("lora:dataset=sst2:scale=0", "scale is 0.0, must be positive"),
        (f"lora:dataset=sst2:checkpoint={broken}", "cannot be read"),
    ):
        check_refused(message, RunSetup, replace(config, task=task), 0)


def test_pickled_weights_are_refused(data_dir, tmp_path):
    import shutil

    folder = tmp_path / "pickled"
    shutil.copytree(data_dir / "bert-base-uncased", folder)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunSetup(settings(data_dir, task=f"lora:dataset=sst2:checkpoint={folder}"), 0)
