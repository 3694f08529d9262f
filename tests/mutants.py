"""Breaks the code on purpose, one line at a time, in a copy of the project, and checks that the suite notices.

make mutants                        all of them, some minutes
python tests/mutants.py cache tree  those whose name holds one of the words
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: name: (file, what stands there, what the mutant has, the tests that should notice)
MUTANTS = {
    "combine: fused multiply-add": (
        "engine/formula/combine.hpp",
        "return acc + weight * value;",
        "T sum = acc;\n"
        "  for (unsigned k = 0; k < sizeof(T) / 8; ++k)\n"
        "    ((double*)&sum)[k] = __builtin_fma(((double*)&weight)[k], ((double*)&value)[k], ((double*)&acc)[k]);\n"
        "  return sum;",
        "test_bits.py",
    ),
    "combine: a factor that is almost one": (
        "engine/formula/combine.hpp",
        "return acc + weight * value;",
        "return acc + weight * (value * (1 + 1e-9));",
        "test_ops.py",
    ),
    "calibrate: wrong sign of the cached mean": (
        "engine/formula/calibrate.hpp",
        "return acc + sum * inverse_num_clients;",
        "return acc - sum * inverse_num_clients;",
        "test_rules.py",
    ),
    "calibrate: the cached mean is off": (
        "engine/cpu/calibrate.hpp",
        "lanes.load(sum + i), lanes.fill(inverse)",
        "lanes.load(sum + i) + 1e-9, lanes.fill(inverse)",
        "test_ops.py",
    ),
    "calibrate: the cache sum in float32": (
        "engine/cpu/calibrate.hpp",
        "  add_mean(pass.calibrate.sum, pass.calibrate.num_clients, tile, v);\n  add_all",
        "  double* const sum = pass.calibrate.sum.data + tile.begin;\n"
        "  for (std::int64_t i = 0; i < tile.size; ++i) sum[i] = static_cast<float>(sum[i]);\n"
        "  add_mean(pass.calibrate.sum, pass.calibrate.num_clients, tile, v);\n  add_all",
        "test_identities.py",
    ),
    "step: a learning rate that is almost right": (
        "engine/formula/step.hpp",
        "lr * direction",
        "lr * (1 + 1e-9) * direction",
        "test_ops.py",
    ),
    "step: epsilon under the root's scale": (
        "engine/formula/step.hpp",
        "(root * root_scale + epsilon)",
        "((root + epsilon) * root_scale)",
        "test_stages.py",
    ),
    "step: Yogi without its sign": (
        "engine/formula/step.hpp",
        "return zero < x ? one : (x < zero ? -one : x);",
        "return one;",
        "test_stages.py",
    ),
    "step: AMSGrad's root of v": (
        "engine/cpu/step.hpp",
        "square = formula::greater(lanes.load(v_hat + i), square);\n      lanes.store(v_hat_out + i, square);",
        "lanes.store(v_hat_out + i, formula::greater(lanes.load(v_hat + i), square));",
        "test_stages.py",
    ),
    "step: from the rounded state": (
        "engine/cpu/step.hpp",
        "lanes.store(m_out + i, next);",
        "lanes.store(m_out + i, next);\n    const_cast<decltype(lanes.load(m + i))&>(next) = lanes.load(m_out + i);",
        "test_stages.py",
    ),
    "calibrate: the cached mean of before": (
        "engine/cpu/calibrate.hpp",
        "AFFLUX_FN void cached_mean(const Pass& pass, Tile tile, double* __restrict v) {",
        "AFFLUX_FN void cached_mean(const Pass& pass, Tile tile, double* __restrict v) {\n"
        "  return cached_difference<T>(pass, tile, v);",
        "test_stages.py",
    ),
    "memory: one that changes is not written": (
        "engine/cpu/memory.hpp",
        "if (row[k] != (k == s ? 1.0 : 0.0)) return false;",
        "if (k == s && row[k] != 1.0) return false;",
        "test_stages.py",
    ),
    "simd: a vector of -0.0 is filled with +0.0": (
        "engine/cpu/simd.hpp",
        "return value - Doubles{};",
        "return Doubles{} + value;",
        "test_stages.py",
    ),
    "gram: products of mixed types are fused": (
        "engine/cpu/simd.hpp",
        "sizeof(X) == sizeof(double) || sizeof(Y) == sizeof(double)",
        "sizeof(X) == sizeof(double) && sizeof(Y) == sizeof(double)",
        "test_bits.py",
    ),
    "elementary: ln 2 in 53 bits": (
        "engine/formula/elementary.hpp",
        "double_of(0x3C7ABC9E3B39803Fu)",
        "0.0",
        "test_elementary.py",
    ),
    "dialects: the law of NVFlare without its one more": (
        "python/afflux/rules/dialects.py",
        "return 1.0 / (1.0 + sqrt(1.0 + staleness))",
        "return 1.0 / (1.0 + sqrt(staleness))",
        "test_dialects.py",
    ),
    "dialects: the mean over versions is over the buffer": (
        "python/afflux/rules/dialects.py",
        "pulled.count(v)",
        "len(pulled)",
        "test_dialects.py",
    ),
    "order: lanes added one after the other": (
        "engine/formula/reduce.hpp",
        "for (int half = count / 2; half > 0; half /= 2)\n"
        "    for (int lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];",
        "for (int lane = 1; lane < count; ++lane) lanes[0] = lanes[0] + lanes[lane];",
        "test_bits.py",
    ),
    "order: an unbalanced tree over superblocks": (
        "engine/entry/tree.hpp",
        "while (left * 2 < count) left *= 2;",
        "left = count - 1;",
        "test_bits.py",
    ),
    "edges: a zero weight is read": (
        "engine/cpu/combine.hpp",
        "if (all_weights[k] == 0.0) continue;",
        "",
        "test_ops.py",
    ),
    "edges: the last block's bad value is missed": (
        "engine/cpu/ingest.hpp",
        "if (!formula::finite(squares) && sums.first_nonfinite < 0)",
        "if (!formula::finite(squares) && sums.first_nonfinite < 0 && n == kBlock)",
        "test_ops.py",
    ),
    "edges: an overflowing sum of squares counts as a bad value": (
        "engine/cpu/ingest.hpp",
        "    if (!formula::finite(simd::One::load(slot + i))) return i;\n  return -1;",
        "    if (!formula::finite(simd::One::load(slot + i))) return i;\n  return begin;",
        "test_types.py",
    ),
    "types: bfloat16 rounds ties away from zero": (
        "engine/formula/half.hpp",
        "bits + 0x7FFFu + ((bits >> 16) & 1u)",
        "bits + 0x8000u",
        "test_types.py",
    ),
    "types: subnormals of float16 are flushed": (
        "engine/formula/half.hpp",
        " | (subnormal & ~is_normal)",
        "",
        "test_types.py",
    ),
    "types: products of float64 are fused": (
        "engine/cpu/simd.hpp",
        "  if constexpr (sizeof(X) == sizeof(double) || sizeof(Y) == sizeof(double)) return acc + x * y;\n",
        "",
        "test_bits.py",
    ),
    "parts: a part is read from its front in every block": (
        "engine/cpu/ingest.hpp",
        "const std::int64_t at = begin - part->begin;",
        "const std::int64_t at = 0;",
        "test_types.py",
    ),
    "buffers: a checksum that knows no order": (
        "csrc/buffers.cpp",
        "sum = mixed(sum, mixed(chains[k], words[k]));",
        "sum += words[k];",
        "test_buffers.py",
    ),
    "threads: the caller's floating-point mode is kept": (
        "engine/cpu/parallel_for.cpp",
        "_mm_setcsr(0x1F80);",
        "",
        "test_bits.py",
    ),
    "round: no canonical order": (
        "python/afflux/round.py",
        "return sorted(waiting, key=lambda w: (w.client_id, w.version, w.join))",
        "return list(waiting)",
        "test_rules.py",
    ),
    "round: the canonical order forgets the version": (
        "python/afflux/round.py",
        "key=lambda w: (w.client_id, w.version, w.join)",
        "key=lambda w: (w.client_id, w.join)",
        "test_rules_contract.py",
    ),
    "round: buffers are weighted": (
        "python/afflux/round.py",
        "ones = np.array([float(yes) for yes in accepted(weights)])",
        "ones = weights.vectors",
        "test_models.py",
    ),
    "server: a failing rule loses the buffer": (
        "python/afflux/rounds.py",
        "        sealed = prepare(self._rule",
        "        self._joins.book = self._joins.book._replace(filled=0)\n        sealed = prepare(self._rule",
        "test_server.py",
    ),
    "store: a round writes over the committed sum": (
        "python/afflux/store/vectors.py",
        "next(slot for slot in self._slots[name] if slot != kept)",
        "next(slot for slot in self._slots[name] if slot == (kept or 0))",
        "test_store_crashes.py",
    ),
    "store: a row is replaced in its committed slot": (
        "python/afflux/store/disk.py",
        "if row is not None and client_id in changed and client_id not in apart:",
        "if row is not None and client_id not in apart:",
        "test_store_crashes.py",
    ),
    "store: a freed slot is used before the commit": (
        "python/afflux/store/disk.py",
        "(left if client_id in changed else retired).append(slot)",
        "left.append(slot)",
        "test_store_crashes.py",
    ),
    "store: the version is told before it is saved": (
        "python/afflux/round.py",
        "return self.saved and bool(self.done)",
        "return bool(self.done)",
        "test_store_errors.py",
    ),
    "store: a damaged row passes": (
        "python/afflux/store/disk.py",
        "if row_crc(row, self.codec) == place.crc:",
        "if len(row_crc(row, self.codec)) == len(place.crc):",
        "test_store_errors.py",
    ),
    "store: a place is remembered beyond the commit that moves it": (
        "python/afflux/store/disk.py",
        "        self._known = {}  # first",
        "        pass  # first",
        "test_store_commits.py",
    ),
    "store: a push does not wait for its row": (
        "python/afflux/server.py",
        "                fetch()\n",
        "                pass\n",
        "test_store_errors.py",
    ),
    "joins: a round that is being made is not counted": (
        "python/afflux/joins.py",
        "staleness = book.current.version + (book.round is not None) - version",
        "staleness = book.current.version - version",
        "test_concurrency.py",
    ),
    "checkpoint: joins start again": (
        "python/afflux/checkpoint.py",
        '"joins": book.number,',
        '"joins": 0,',
        "test_log.py",
    ),
    "selection: stage two clips what the first clip has left out": (
        "python/afflux/selection.py",
        "_shrink(clip * norm, self.stage_two_clip * size) for",
        "_shrink(norm, self.stage_two_clip * size) for",
        "test_by_hand.py",
    ),
    "selection: the step's clips forget the memory": (
        "python/afflux/selection.py",
        "return np.array([self.alpha * ordered_sum(weights), *weights])",
        "return np.array([self.alpha * ordered_sum(shares), *weights])",
        "test_by_hand.py",
    ),
    "selection: the threshold is on the wrong side": (
        "python/afflux/selection.py",
        "if self.select and cosine < self.sim_min",
        "if self.select and cosine <= self.sim_min",
        "test_rules.py",
    ),
    "score: the threshold is on the wrong side": (
        "python/afflux/score.py",
        "if score < -self.gamma",
        "if score <= -self.gamma",
        "test_rules.py",
    ),
    "score: the bound is epsilon": (
        "python/afflux/score.py",
        "score < -self.gamma * self.epsilon:",
        "score < -self.epsilon:",
        "test_rules.py",
    ),
    "score: scaled and unscaled are exchanged": (
        "python/afflux/score.py",
        "(goal if self.scaled else square)",
        "(square if self.scaled else goal)",
        "test_by_hand.py",
    ),
    "score: the mean is over the rejected too": (
        "python/afflux/score.py",
        "weights / max(accepted, 1)",
        "weights / len(arrivals)",
        "test_by_hand.py",
    ),
    "selection: every law counts from the freshest": (
        "python/afflux/weigh.py",
        " if isinstance(law, Exponential) and not raw else 0",
        " if not raw else 0",
        "test_by_hand.py",
    ),
    "selection: a large beta overflows": (
        "python/afflux/selection.py",
        "self.beta * (cosine - top)",
        "self.beta * cosine",
        "test_by_hand.py",
    ),
    "scheduling: a pass keeps the sum of the last one": (
        "python/afflux/scheduling.py",
        "            rounds = 0.0\n",
        "            rounds, next_[1, 1] = 0.0, 1.0\n",
        "test_rules.py",
    ),
    "rates: a delay of the threshold shortens the step": (
        "python/afflux/rates.py",
        "if tau_max <= self.threshold:",
        "if tau_max < self.threshold:",
        "test_rules.py",
    ),
    "step: bias correction counts from zero": (
        "python/afflux/step.py",
        "steps = arrivals.version + 1.0",
        "steps = max(arrivals.version, 1.0)",
        "test_by_hand.py",
    ),
    "step: v_hat starts at 0": (
        "python/afflux/step.py",
        '"v_hat": self.initial_v}',
        '"v_hat": 0.0}',
        "test_rules.py",
    ),
    "round: weights with rows are not normalised": (
        "python/afflux/round.py",
        "vectors, memories = frozen(vectors / total, np.float64), memories / total",
        "pass",
        "test_composed.py",
    ),
    "store: those seen do not count the new ones": (
        "python/afflux/store/memory.py",
        "len(self.arrays) + sum(old[client_id] is None for client_id in new)",
        "len(self.arrays)",
        "test_identities.py",
    ),
    "store: of a client's arrivals the first stays": (
        "python/afflux/store/rows.py",
        "for i, client_id in enumerate(client_ids) if accepted[i]}",
        "for i, client_id in reversed([*enumerate(client_ids)]) if accepted[i]}",
        "test_rules.py",
    ),
    "streaming: a term that an interrupt has left is added again": (
        "python/afflux/streaming.py",
        "if not self.done:",
        "if self.slot is not None:",
        "test_streaming_threads.py",
    ),
    "streaming: a total starts with what its memory holds": (
        "python/afflux/streaming.py",
        "vector if self.place else total.zeros",
        "vector",
        "test_streaming.py",
    ),
    "streaming: a round does not wait for the terms before it": (
        "python/afflux/rounds.py",
        "joins.book.unfinished:",
        "joins.book.round is not None:",
        "test_streaming_threads.py",
    ),
    "streaming: the factor of a shifted exponential law": (
        "python/afflux/weigh.py",
        "isinstance(law, Exponential) and not raw",
        "isinstance(law, Exponential)",
        "test_streaming.py",
    ),
    "weigh: staleness counted from one": (
        "python/afflux/weigh.py",
        "base = 1.0 + staleness",
        "base = 2.0 + staleness",
        "test_rules.py",
    ),
    "codec: the grid's end lies below the largest value": (
        "engine/formula/codec.hpp",
        "(bits_of(step) + 0x10Fu) & 0xFFFFFF00u",
        "bits_of(step) & 0xFFFFFF00u",
        "test_codecs.py",
    ),
    "codec: beyond bfloat16 lies infinity": (
        "engine/formula/codec.hpp",
        "rounded < 0x7F80u ? rounded : 0x7F7Fu",
        "rounded",
        "test_codecs.py",
    ),
    "codec: all blocks draw the same": (
        "engine/formula/random.hpp",
        "(static_cast<std::uint64_t>(block) + 1)",
        "(static_cast<std::uint64_t>(block) * 0 + 1)",
        "test_codecs.py",
    ),
    "codec: all versions draw the same": (
        "python/afflux/store/rows.py",
        "row_key(self.seed, version, client_id)",
        "row_key(self.seed, 0, client_id)",
        "test_coded_rounds.py",
    ),
    "codec: one scale for a vector, without its extremes": (
        "python/afflux/store/rows.py",
        "extremes if self.codec.ranged else",
        "extremes if not self.codec.keyed else",
        "test_coded_rounds.py",
    ),
    "codec: the errors of all rows are one": (
        "python/afflux/sim/codec_errors.py",
        "row_key(seed, 1, number)",
        "row_key(seed, 1, 0)",
        "test_codec_errors.py",
    ),
    "controls: all steps draw the same": (
        "python/afflux/sim/local.py",
        "[True] * len(clients), self._steps, extremes",
        "[True] * len(clients), 0, extremes",
        "test_sim_local.py",
    ),
    "controls: the keys are those of the rule's rows": (
        "python/afflux/sim/local.py",
        "MemoryRows(size, num_clients, codec, ~seed)",
        "MemoryRows(size, num_clients, codec, seed)",
        "test_sim_local.py",
    ),
    "reproduce: a run with another setting has ended": (
        "python/afflux/sim/papers/finished.py",
        '("afflux", "rule", "options", "seed", "config")',
        '("afflux", "rule", "options", "seed")',
        "test_sim_finished.py",
    ),
    "reproduce: a line that was cut off is a run": (
        "python/afflux/sim/papers/finished.py",
        '.split("\\n")[:-1]',
        ".splitlines()",
        "test_sim_finished.py",
    ),
    "reproduce: differences are not paired": (
        "python/afflux/sim/papers/mf_ca2fl.py",
        "by_seed[run.seed]",
        "by_seed[0]",
        "test_sim_finished.py",
    ),
}


def copy_of_the_project(folder: Path) -> Path:
    """What git tracks, as it stands in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(project: Path) -> None:
    """Builds the extension into the copy's package."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    configure = ["-DAFFLUX_PYTHON=ON", "-DAFFLUX_CUDA=off", f"-DPython_EXECUTABLE={sys.executable}"]
    package = project / "python" / "afflux"
    commands = [
        ["cmake", "-S", ".", "-B", "build", *configure, f"-DCMAKE_INSTALL_PREFIX={package}"],
        ["cmake", "--build", "build", "--parallel", "2"],
        ["cmake", "--install", "build"],
    ]
    for command in commands:
        subprocess.run(command, cwd=project, env=env, check=True, capture_output=True)


def suite_passes(project: Path, tests: str) -> bool:
    """Runs a test file of the copy against the copy's package."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", f"tests/{tests}"]
    env = os.environ | {"PYTHONPATH": str(project / "python")}
    return subprocess.run(command, cwd=project, env=env, capture_output=True).returncode == 0


def main() -> int:
    words = sys.argv[1:]
    wanted = {name: m for name, m in MUTANTS.items() if not words or any(word in name for word in words)}
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        project = copy_of_the_project(Path(folder))
        build(project)
        for tests in sorted({m[3] for m in wanted.values()}):
            if not suite_passes(project, tests):
                print(f"{tests} fails without any mutant")
                return 2
        for name, (file, old, new, tests) in wanted.items():
            path = project / file
            source = path.read_text()
            if source.count(old) != 1:
                print(f"{name}: the line to break stands {source.count(old)} times in {file}")
                return 2
            path.write_text(source.replace(old, new))
            if not file.endswith(".py"):
                build(project)
            survived = suite_passes(project, tests)
            path.write_text(source)
            survivors += [name] if survived else []
            print(f"{'SURVIVED' if survived else 'killed':8}  {name}  ({tests})", flush=True)
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
