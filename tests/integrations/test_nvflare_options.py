"""The arguments of NVFlare's server object in the configuration of a job, and the page."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.collab import CollabRecipe, collab
from nvflare.fuel.utils.class_utils import ModuleScanner
from nvflare.fuel.utils.component_builder import ComponentBuilder

from afflux.integrations.nvflare import AsyncServer
from afflux.rules import RULES, ca2fl, fadas, fedbuff
from conftest import check_error
from nvflare_servers import Small, run, small
from nvflare_sites import Client, Sites


class Builder(ComponentBuilder):
    """NVFlare's, which takes a dict with a name for a component if there is a class of this name."""

    def get_module_scanner(self):
        return ModuleScanner(["nvflare"], ["apis", "app_common", "widgets", "app_opt"], True)


def test_arguments_go_through_the_configuration_of_a_job(tmp_path):
    """They are JSON there, from which NVFlare makes the object again."""
    rule = fadas(buffer_size=3, server_lr=0.5)
    arguments = {"settings": {"concurrency": 2, "server_options": {"max_staleness": 4}}, "params_type": "DIFF"}
    own = Small(rule, num_rounds=7, weight_key="n", call_args={"epochs": 3}, **arguments)
    recipe = CollabRecipe("job", server=own, client=Client(), min_clients=1)
    recipe.export(str(tmp_path))
    (path,) = tmp_path.rglob("config_fed_server.json")
    (component,) = [each for each in json.loads(path.read_text())["components"] if each["id"] == "_server"]
    again = Builder().build_component(component)
    assert again.configured() == own.configured() == (rule, own.configured()[1])
    for name in ("num_rounds", "params_type", "weight_key", "loss_key", "call", "call_args", "settings"):
        assert getattr(again, name) == getattr(own, name)
    assert not [*tmp_path.rglob("nvflare"), *tmp_path.rglob("nvflare.py")]  # which would hide NVFlare itself


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_has_a_configuration(name):
    rule = RULES[name]()
    assert Small(rule).configured()[0] == Small(json.loads(json.dumps(rule.to_config()))).configured()[0] == rule
    assert Small(name).configured()[0] == rule


def test_its_own_names_of_options():
    import yaml

    text = "{num_updates_for_model: 4, global_lr: 0.5, staleness_weight: true, max_model_history: 3}"
    rule, settings = Small("fedbuff", yaml.safe_load(text)).configured()
    assert rule == fedbuff(buffer_size=4, server_lr=0.5, dialect="nvflare")
    assert settings.server_options == {"max_staleness": 2}
    rule, settings = Small(
        "ca2fl", {"num_updates_for_model": 4, "global_lr": 0.5, "max_model_history": None}
    ).configured()
    assert rule == ca2fl(buffer_size=4, server_lr=0.5)
    assert settings.server_options == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": 3}, "rule is 3, must be a dict"),
        ({"rule_options": {"buffer_size": 0}}, "buffer_size"),
        ({"rule_options": {"staleness": np.ones(3)}}, "rule_options is .*must be a dict as JSON has it"),
        ({"rule": "ca2fl", "rule_options": {"global_lr": 1.0, "server_lr": 1.0}}, "global_lr is the name of server_lr"),
        ({"rule_options": {"max_model_history": 0}}, "max_model_history is 0, must be an int of at least 1"),
        ({"num_rounds": 0}, "num_rounds is 0"),
        ({"params_type": "full"}, "params_type is 'full', must be 'FULL' or 'DIFF'"),
        ({"call": 3}, "call is 3, must be a str"),
        ({"settings": {"concurrent": 3}}, "settings has 'concurrent', which is no setting"),
        ({"settings": {"store": "here"}}, "store is 'here', must be an absolute path"),
        ({"settings": {"server_options": {"faults": "raise"}}}, "faults"),
        (
            {"rule_options": {"max_model_history": 2}, "settings": {"server_options": {"max_staleness": 1}}},
            "max_model_history and max_staleness are both given",
        ),
    ],
)
def test_errors_are_raised_where_the_job_is_made(arguments, message):
    check_error(message, Small, **arguments)


def test_the_class_itself_is_no_server_object():
    check_error(r"AsyncServer lacks initial_model\(\): define it in a subclass", AsyncServer)


AROUND_THE_PAGE = """
import json
import numpy as np
import yaml

class Model:
    def __init__(self):
        self.arrays = {"w": np.zeros(3, np.float32)}

    def state_dict(self):
        return self.arrays

    def load_state_dict(self, arrays):
        self.arrays = {name: np.array(array) for name, array in arrays.items()}

new_model = Model

def fit(own):
    own.arrays["w"] += 1
    return 0.5, 3
"""


def test_the_page_runs(tmp_path, monkeypatch):
    """Its first block is a job, which is exported, and runs over functions; its second makes server objects; its third
    has a filter.
    """
    pytest.importorskip("yaml")
    page = (Path(__file__).parents[2] / "docs" / "guides" / "nvflare.md").read_text()
    job, rules, filtered = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "job_of_the_page.py").write_text(AROUND_THE_PAGE + job)
    monkeypatch.syspath_prepend(str(tmp_path))
    import job_of_the_page

    recipe = job_of_the_page.recipe()
    recipe.export(str(tmp_path / "exported"))
    assert [*(tmp_path / "exported").rglob("job_of_the_page.py")]
    train, server = job_of_the_page.Client().train, recipe.server
    server.num_rounds = 3
    last = run(
        server,
        Sites({f"site-{i}": lambda model, version: train(model=model, version=version) for i in range(8)}),
        monkeypatch,
    )
    assert last["w"].min() > 0
    assert server.server.counts["joined"] == 12
    names = dict(vars(job_of_the_page))
    made = [eval(line, names) for line in rules.splitlines() if line.startswith("Server(") and "settings=" not in line]
    exec(compile(rules, "nvflare.md", "exec"), names)
    assert [each.configured()[0].name for each in made] == ["fadas", "fedbuff"]
    assert names["settings"] == {"server_options": {"max_staleness": 20}}
    # The functions of these tests have no context of a call.
    names["collab"] = SimpleNamespace(publish=collab.publish, fl_ctx=FLContext())
    exec(compile(filtered, "nvflare.md", "exec"), names)
    train, server = names["PrivateClient"]().train, small("fedbuff", {"buffer_size": 2}, params_type="DIFF")
    server.model = lambda: {"w": np.zeros(3, np.float32)}
    sites = {f"site-{i}": lambda model, version: train(model=model, version=version) for i in range(2)}
    assert run(server, Sites(sites), monkeypatch)["w"].tolist() == [1.5, 1.5, 1.5]  # at most the filter's gamma a step
