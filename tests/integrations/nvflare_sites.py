"""Collab for tests: NVFlare's own groups and proxies over sites that are functions, which reply in a seed's order."""

import random
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("nvflare.collab", reason="needs nvflare: make test-integrations")

from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.collab import collab
from nvflare.collab.api._invocation import _InvocationDispatcher
from nvflare.collab.api.app import ServerApp
from nvflare.collab.api.constants import FL_CONTEXT_PROP
from nvflare.collab.api.context import set_call_context
from nvflare.collab.api.decorators import get_object_publish_interface
from nvflare.collab.api.proxy import Proxy

from afflux.integrations import nvflare as adapter
from afflux.integrations._nvflare_calls import CollabTransport


class Lost(Exception):
    """Raised by a site whose call never ends."""


class Client:
    """What the sites publish; their functions are called instead."""

    @collab.publish
    def train(self, model, version):
        raise NotImplementedError


class Engine:
    """Records the events that components fire."""

    def __init__(self):
        self.events = []
        self.contexts = FLContextManager(engine=self, identity_name="server", job_id="job", public_stickers={})

    def new_context(self):
        return self.contexts.new_context()

    def fire_event(self, event_type, fl_ctx):
        names = {"global_model": AppConstants.GLOBAL_MODEL, "current_round": AppConstants.CURRENT_ROUND}
        fields = {name: fl_ctx.get_prop(key) for name, key in names.items()}
        data = fl_ctx.get_prop(FLContextKey.EVENT_DATA)
        if data is not None:
            fields["data"] = from_shareable(data).data
        self.events.append((event_type, fields))


class Sites(_InvocationDispatcher):
    """All sites: {name: function(model, version) -> what the site returns}.

    Each look of the server finds some of the results that are under way, at least one if there is one.
    """

    def __init__(self, functions, seed=0, most=2):
        super().__init__(Signal())
        self.functions = functions
        self.random = random.Random(seed)
        self.most = most
        self.lock = threading.Lock()
        self.sent = 0  # calls that the server has made
        self.calls = []  # (number, site, version), as they were made
        self.under_way = []  # (number, call, result)
        self.registered = 0
        self.engine = Engine()

    def call_target_in_group(self, gcc, func_name, *args, **kwargs):
        assert func_name == "train"
        assert not args
        site = gcc.target_name
        with self.lock:
            number = self.registered
            self.calls.append((number, site, kwargs["version"]))
            try:
                self.under_way.append((number, gcc, self.functions[site](kwargs["model"], kwargs["version"])))
            except Lost:
                pass
            except Exception as error:
                self.under_way.append((number, gcc, error))
            self.registered += 1

    def deliver(self):
        """Hands over some of the results."""
        while self.registered < self.sent:
            time.sleep(0.0001)
        with self.lock:
            ready = sorted(self.under_way, key=lambda each: each[0])
            some = self.random.sample(ready, min(len(ready), self.random.randint(1, self.most)))
            for each in some:
                self.under_way.remove(each)
        for _, gcc, result in some:
            if isinstance(result, Exception):
                gcc.set_exception(result)
            else:
                gcc.set_result(result)
            gcc.call_completed()

    @contextmanager
    def around(self, server, monkeypatch):
        """The context in which NVFlare calls a main function."""
        sites = self

        class Transport(CollabTransport):
            def send(self, address, task):
                key = super().send(address, task)
                sites.sent += key is not None
                while sites.registered < sites.sent:  # in the order of the calls
                    time.sleep(0.0001)
                return key

            def replies(self, keys):
                sites.deliver()
                return super().replies(keys)

        monkeypatch.setattr(adapter, "CollabTransport", Transport)
        app = ServerApp(server)
        interface = get_object_publish_interface(Client())
        app._client_proxies = [Proxy(app, name, name, self, interface) for name in self.functions]
        app._abort_signal = self.abort_signal
        app.set_prop(FL_CONTEXT_PROP, self.engine.new_context())
        set_call_context(app.new_context("server", "server"))
        try:
            yield
        finally:
            set_call_context(None)


def adds(value, steps=10, **metrics):
    """A site that adds a number to each element of the model."""

    def site(model, version):
        moved = {name: (array + value).astype(array.dtype) for name, array in model.items()}
        return moved, {"num_steps": steps, "train_loss": 1.0, **metrics}

    return site


def flat(model):
    return np.concatenate([np.ravel(array) for array in model.values()])
