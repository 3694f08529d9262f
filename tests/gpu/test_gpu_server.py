"""A server whose params are on a GPU: torch's and CuPy's arrays, the same bits as on the CPU."""

import gc
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from afflux import BusyError, Server, UnavailableError, ops
from afflux.arrays.interop import on_host as to_numpy
from afflux.rules import RULES, ca2fl, dp_fedbuff, fadas, fedbuff, mf_ca2fl, wkafl, zenopp
from afflux.server.assembly import RepeatedKey
from conftest import bits, check_error, check_raises, needs_fork, raising, same_state
from device import emulated, libraries, needs_device, on_host
from inside import aggregator_of, slots_taken
from stores import same

pytestmark = needs_device
D = 3000


@pytest.fixture(params=list(libraries()))
def moved(request):
    """To the device, into an array of a library."""
    with on_host():
        yield libraries()[request.param]


@pytest.fixture
def vectors(rng):
    return [rng.standard_normal(D).astype(np.float32) for _ in range(12)]


def pushes(server, vectors, **options):
    """The receipts of one push per vector, by a few clients."""
    return [
        server.push(client=i % 5, **{server.rule.kind: vector}, version=server.version, **options)
        for i, vector in enumerate(vectors)
    ]


def address(array):
    return array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr


@pytest.mark.parametrize("name", RULES)
def test_every_rule_keeps_all_of_its_state_there(name, moved, vectors):
    def made(params):
        rule = RULES[name](**({} if name in ("fedasync", "zenopp") else {"buffer_size": 4}))
        server = Server(rule, params, num_clients=5)
        for memory in rule.needs.handed_in:
            server.set_rule_vector(memory, vectors[11] if params is here else moved(vectors[11]))
        return server

    here = vectors[0]
    mine, theirs = made(here), made(moved(here))
    receipts = pushes(mine, vectors), pushes(theirs, [moved(v) if i % 2 else v for i, v in enumerate(vectors)])
    assert [r.status for r in receipts[0]] == [r.status for r in receipts[1]]
    same(mine, theirs)
    kind = type(moved(here))
    assert type(theirs.params) is kind
    assert all(type(vector) is kind for vector in theirs.rule_vectors.values())
    if mine.rows is not None:
        assert type(theirs.rows.sum) is type(theirs.rows.row(1)) is kind
        assert bits(to_numpy(theirs.rows.row(1))) == bits(mine.rows.row(1))


@pytest.mark.parametrize(
    "options",
    [{"accumulate": True}, {"dtype": "float64"}, {"inplace": True}, {"faults": "record", "max_staleness": 2}],
    ids=lambda options: next(iter(options)),
)
def test_options_mean_the_same(options, moved, vectors):
    mine, theirs = (Server(fedbuff(buffer_size=4), put(vectors[0]), **options) for put in (np.array, moved))
    if "faults" in options:
        vectors[3][7] = np.nan
    pushes(mine, vectors)
    pushes(theirs, [moved(vector) for vector in vectors])
    same(mine, theirs)
    assert (address(theirs.params) == address(theirs.params)) != ("inplace" in options)


def test_noise_has_the_bits_of_the_cpu(moved, vectors):
    rule, key = dp_fedbuff(buffer_size=4, noise_multiplier=1.5), RepeatedKey(range(32))
    mine, theirs = (Server(rule, put(vectors[0]), noise_key=key) for put in (np.array, moved))
    pushes(mine, vectors)
    pushes(theirs, [moved(vector) for vector in vectors])
    same(mine, theirs)


def test_a_state_goes_from_one_device_to_the_other(moved, vectors):
    for rule in (ca2fl(buffer_size=4), mf_ca2fl(buffer_size=4, bits=4), fadas(buffer_size=4), wkafl(buffer_size=4)):
        mine, theirs = (Server(rule, put(vectors[0]), num_clients=5) for put in (np.array, moved))
        pushes(mine, vectors[:6])
        theirs.load_state_dict(mine.state_dict())
        pushes(mine, vectors[6:])
        pushes(theirs, vectors[6:])
        same(mine, theirs)
        again = Server(rule, np.zeros(D, np.float32), num_clients=5)
        again.load_state_dict(theirs.state_dict())
        same(again, mine)


def test_versions_are_counted_as_long_as_a_view_of_them_is_held(moved, vectors):
    server = Server(fedbuff(buffer_size=1), moved(vectors[0]), max_versions=2)
    part = server.params[10:20]
    before = bits(to_numpy(part))
    pushes(server, vectors[:1])
    assert server.versions_held == 2
    check_error("all 2 versions of max_versions", server.push, client=1, **{server.rule.kind: vectors[1]}, version=1)
    assert bits(to_numpy(part)) == before
    del part
    gc.collect()
    assert server.versions_held == 1
    server.push(client=1, **{server.rule.kind: vectors[1]}, version=1)


def test_slots_run_out_and_come_free(moved, vectors):
    server = Server(fedbuff(buffer_size=3), moved(vectors[0]), max_slots=3)
    pushes(server, vectors[:2])
    held = aggregator_of(server).take_slot(0)
    with pytest.raises(BusyError, match="all 3 slots of max_slots are taken"):
        server.push(client=4, **{server.rule.kind: vectors[3]}, version=0, timeout=0)
    del held
    assert server.push(client=4, **{server.rule.kind: vectors[3]}, version=0, timeout=0).version == 1
    assert slots_taken(server) == 0


def test_a_version_that_was_pulled_is_the_callers_object(moved, vectors):
    server = Server(fedbuff(buffer_size=1), moved(vectors[0]))
    pulled = server.pull()
    if hasattr(pulled.params, "requires_grad_"):
        pulled.params.requires_grad_()  # the object, not the memory
    assert server.push(client=1, **{server.rule.kind: vectors[1]}, version=0).version == 1
    twin = Server(fedbuff(buffer_size=1), np.array(vectors[0]))
    twin.push(client=1, **{twin.rule.kind: vectors[1]}, version=0)
    assert bits(to_numpy(server.params)) == bits(twin.params)


def test_what_is_made_in_inference_mode_can_be_used_outside(vectors):
    import torch

    put = libraries()["torch"]
    with on_host(), torch.inference_mode():
        server = Server(fadas(buffer_size=1), put(vectors[0]), inplace=True)
        server.push(client=1, **{server.rule.kind: vectors[1]}, version=0)
    with on_host():
        assert server.push(client=1, **{server.rule.kind: vectors[1]}, version=1).version == 2
        assert not server.pull().params.is_inference()


def test_what_lies_elsewhere(moved, vectors):
    here, there = (Server(fedbuff(buffer_size=4), put(vectors[0])) for put in (np.array, moved))
    check_error("client 1's .* is on cuda:0", here.push, client=1, **{here.rule.kind: moved(vectors[1])}, version=0)
    assert there.push(client=1, **{there.rule.kind: np.ones(2 * D, np.float32)[::2]}, version=0).status == "joined"
    assert (here.counts["refused"], there.counts["refused"]) == (1, 0)
    check_error("several devices: a on cuda:0, b on", Server, fedbuff(), {"a": moved(vectors[0]), "b": vectors[0]})


def test_bfloat16_slots(moved, vectors):
    if type(moved(vectors[0])).__module__ == "cupy":
        with pytest.raises(UnavailableError, match=r"slot_dtype is 'bfloat16', which CuPy lacks"):
            Server(fedbuff(), moved(vectors[0]), slot_dtype="bfloat16")
        return
    options = {"slot_dtype": "bfloat16", "num_clients": 5}
    mine, theirs = (Server(ca2fl(buffer_size=4), put(vectors[0]), **options) for put in (np.array, moved))
    pushes(mine, vectors[:6])
    pushes(theirs, [moved(vector) for vector in vectors[:6]])
    same(mine, theirs)
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    same(mine, theirs)


class OfAnotherLibrary:
    """An array on the GPU that cannot be made here."""

    shape, dtype = (5,), np.dtype(np.float32)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        raise AssertionError("must not be asked")


def test_other_libraries_arrays():
    check_error("is a OfAnotherLibrary on cuda:0", Server, fedbuff(), OfAnotherLibrary(), error=UnavailableError)


def test_trees_go_in_and_come_out(moved, rng):
    def tree(put=np.array):
        return {"w": put(numbers.reshape(20, 5)), "n": np.array(3), "b": put(numbers[:7].astype(np.float64))}

    numbers = rng.standard_normal(100).astype(np.float32)
    mine, theirs = Server(fedbuff(buffer_size=2), tree()), Server(fedbuff(buffer_size=2), tree(moved))
    for server, put in ((mine, np.array), (theirs, moved)):
        server.push(client=1, **{server.rule.kind: tree(put)}, version=0, buffers={"n": np.array(5)})
        server.push(client=2, **{server.rule.kind: tree()}, version=0, buffers={"n": np.array(7)})
    same(mine, theirs)
    expected, out, here = tree(), tree(moved), tree()
    assert mine.pull(out=expected) == theirs.pull(out=out) == theirs.pull(out=here) == 1
    flat = np.empty(107, np.float32)
    theirs.pull(out=flat)
    assert bits(flat) == bits(mine.params)
    layout, views = theirs.layout, theirs.layout.views(theirs.params)
    for name in ("w", "b"):
        assert bits(to_numpy(out[name])) == bits(here[name]) == bits(expected[name])
        assert bits(to_numpy(views[name]).astype(expected[name].dtype)) == bits(expected[name])
    assert here["n"] == expected["n"] == 6
    again = moved(np.zeros(107, np.float32))
    layout.flatten({"w": out["w"], "b": out["b"]}, out=again)
    assert bits(to_numpy(again)) == bits(mine.params) == bits(layout.flatten(out))
    check_error(r"\[layout\] flat is float32 of shape \(50,\)", layout.views, theirs.params[:50])
    integers = {"w": np.zeros((20, 5), np.int32), "b": np.zeros(7, np.int8)}
    check_error(r"\[layout\] w is int32, .* the model's floats would be rounded", layout.load, integers, theirs.params)


def test_set_memory_and_a_wrong_one(moved, vectors):
    server = Server(zenopp(server_lr=0.5), moved(vectors[0]))
    check_error(r"\[set_rule_vector\] validation has 4", server.set_rule_vector, "validation", moved(vectors[1][:4]))
    server.set_rule_vector("validation", moved(vectors[1]))
    before = bits(to_numpy(server.rule_vectors["validation"]))
    server.rule_vectors["validation"][:] = moved(vectors[2])  # a copy
    assert bits(to_numpy(server.rule_vectors["validation"])) == before == bits(vectors[1])


@pytest.mark.skipif(emulated is None, reason="streams are asked on the emulated device")
class TestStreams:
    def asked(self, monkeypatch, library):
        """The devices whose current streams are read, and those that are waited for."""
        asked, waited, cuda = [], [], sys.modules[library].cuda

        def current(device=-1):
            asked.append(device)
            return SimpleNamespace(cuda_stream=0, ptr=0, synchronize=lambda: waited.append(device))

        monkeypatch.setattr(cuda, "current_stream" if library == "torch" else "get_current_stream", current)
        return asked, waited

    @pytest.mark.parametrize("library", ["cupy", "torch"])
    def test_the_stream_is_that_of_the_arrays_device(self, library, monkeypatch, vectors):
        put = libraries()[library]
        with on_host():
            one, two = put(vectors[0]), put(vectors[1])
            asked, _ = self.asked(monkeypatch, library)
            ops.ingest(one, two)
        # A GPU's torch is asked by its C functions.
        assert set(asked) == {0} or (library == "torch" and not emulated and not asked)

    def test_a_tree_of_another_library_is_waited_for(self, monkeypatch, vectors):
        """CuPy's memory may be used again on CuPy's stream, while torch still reads it on its own."""
        in_cupy, in_torch = libraries()["cupy"], libraries()["torch"]
        monkeypatch.setattr("afflux.arrays.interop.as_torch", lambda array: in_torch(array.host))
        with on_host():
            server = Server(fedbuff(), {"a": in_cupy(vectors[0]), "b": in_cupy(vectors[1])})
            out = {name: in_torch(vectors[2]) for name in ("a", "b")}
            _, waited = self.asked(monkeypatch, "torch")
            server.pull(out=out)
        assert bits(to_numpy(out["b"])) == bits(vectors[1])
        assert set(waited) == {0}


@pytest.mark.skipif(emulated is None, reason="counts calls of the fakes")
class TestExports:
    """Calls of a tensor's __dlpack__, which take microseconds each."""

    @pytest.fixture
    def exports(self, monkeypatch):
        fakes = pytest.importorskip("fake_torch")
        if not hasattr(fakes, "EXCHANGE"):
            pytest.skip("torch is older than 2.10")
        exports, export = [], fakes.CudaTensor.__dlpack__

        def counted(tensor, **options):
            exports.append(options["stream"])
            return export(tensor, **options)

        monkeypatch.setattr(fakes.CudaTensor, "__dlpack__", counted)
        return exports

    @pytest.mark.parametrize("rule", [fedbuff, fadas, ca2fl, mf_ca2fl, wkafl], ids=lambda rule: rule.__name__)
    def test_pushes_and_a_round_make_none(self, rule, exports, vectors):
        moved = libraries()["torch"]
        with on_host():
            server = Server(rule(buffer_size=5), moved(vectors[0]), num_clients=5)
            for _ in range(2):
                pushes(server, [moved(vector) for vector in vectors[1:6]])
        assert (server.version, exports) == (2, [])

    def test_another_stream_than_that_of_the_call_is_ordered_by_one(self, exports, monkeypatch, vectors):
        moved, cuda = libraries()["torch"], sys.modules["torch"].cuda
        streams = iter([0, 7])
        monkeypatch.setattr(cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=next(streams)))
        ops.ingest(moved(vectors[0]), slot := moved(vectors[1]))
        assert exports == [1]  # the call's stream, DLPack's default one
        assert bits(to_numpy(slot)) == bits(vectors[0])


@pytest.mark.skipif(emulated is None, reason="looks for copies of the fakes")
def test_a_state_is_copied_once(moved, vectors, monkeypatch):
    server = Server(ca2fl(buffer_size=2), moved(vectors[0]), num_clients=5)
    pushes(server, vectors[:3])
    expected = server.state_dict()["arrays"]["sum"]

    monkeypatch.setattr(type(aggregator_of(server).plane.device), "copy", raising(AssertionError))
    assert bits(server.state_dict()["arrays"]["sum"]) == bits(expected)


def test_a_streaming_server_keeps_nothing_on_the_host(moved, vectors, monkeypatch):

    monkeypatch.setattr("afflux.aggregation.local_plane.np.zeros", raising(AssertionError, "zeros on the host"))
    server = Server(fedbuff(buffer_size=2), moved(vectors[0]), accumulate=True)
    monkeypatch.undo()
    assert pushes(server, vectors[:2])[-1].version == 1


@needs_fork
def test_a_forked_child_has_no_gpu(moved, vectors):
    server = Server(fedbuff(), moved(vectors[0]))
    child = os.fork()
    if child == 0:
        try:
            server.push(client=1, **{server.rule.kind: vectors[0]}, version=0)
        except UnavailableError as error:
            os._exit(0 if "cuda:0 is its parent's" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(emulated is None, reason="a GPU's memory is not run out of on purpose")
def test_out_of_memory_changes_nothing(monkeypatch, vectors):
    with on_host():
        server = Server(ca2fl(buffer_size=3), libraries()["cupy"](vectors[0]), num_clients=5)
        pushes(server, vectors[:2])
        before, own = server.state_dict(), sys.modules["cupy"].empty
        for left in range(3):  # allocations that succeed: the slot, the next version, a row
            rooms = [True] * left

            def empty(*arguments, rooms=rooms):
                if not rooms:
                    raise MemoryError("out of memory")
                rooms.pop()
                return own(*arguments)

            monkeypatch.setattr("cupy.empty", empty)
            check_raises(MemoryError, server.push, client=4, **{server.rule.kind: vectors[3]}, version=0)
            monkeypatch.undo()
            after = server.state_dict()
            same_state(before | {"meta": None}, after | {"meta": None})
        assert server.push(client=4, **{server.rule.kind: vectors[3]}, version=0).version == 1


@pytest.mark.parametrize("make", [fadas, ca2fl])
def test_a_step_has_the_bits_of_one_on_the_cpu(make, moved, vectors):
    there, here = (Server(make(buffer_size=4), params, num_clients=9) for params in (moved(vectors[0]), vectors[0]))
    there.step([(i, 0, vector if i % 2 else moved(vector)) for i, vector in enumerate(vectors[1:7])])
    here.step([(i, 0, vector) for i, vector in enumerate(vectors[1:7])])
    same(there, here)
