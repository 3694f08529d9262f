#include "apply.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <vector>

#include "afflux/afflux.hpp"
#include "arrays.hpp"
#include "checksums.hpp"
#include "release.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// (updates, weights, params_weight)
using CombineOf = std::tuple<py::object, py::object, double>;
// (key, low, high) of a row that is encoded
using FactsOf = std::tuple<std::uint64_t, double, double>;
// (kind, sum, sum_out or None, num_clients, rows, new_rows, codec, facts, quantize_direction)
// codec None: the exact one of the updates
using CalibrateOf = std::tuple<std::string, py::object, py::object, std::int64_t, py::object, py::object,
                               std::optional<std::string>, std::vector<FactsOf>, bool>;
// (kind, lr, beta1, beta2, epsilon, root_scale, states, outs)
using StepOf = std::tuple<std::string, double, double, double, double, double, py::object, py::object>;
// (vectors, outs, weights, next or None)
using MemoryOf = std::tuple<py::object, py::object, py::object, py::object>;

Calibration calibration_named(const std::string& name) {
  if (name == "cached_difference") return Calibration::cached_difference;
  if (name == "cached_mean") return Calibration::cached_mean;
  throw Error("[apply] calibration '" + name + "' is unknown");
}

StepKind step_named(const std::string& wanted) {
  for (const StepKind kind :
       {StepKind::sgd, StepKind::momentum, StepKind::adam, StepKind::amsgrad, StepKind::adagrad, StepKind::yogi})
    if (wanted == name(kind)) return kind;
  throw Error("[apply] step '" + wanted + "' is unknown");
}

// A host array of float64: weights, coefficients.
struct Numbers {
  Numbers(const char* name, const py::object& object, Shape shape = Shape::vector)
      : array({"apply", name}, object, Access::read, shape) {
    array.check_on({});
  }
  List<double> list() const {
    const View<double> view = array.doubles();
    return {view.data, view.size};
  }
  Array array;
};

Arrays<void> written(const char* name, const py::object& objects) {
  return {"apply", name, objects, Access::write, Shape::vector, false, as_view};
}

// Vectors that are overwritten, unless `outs` are.
Arrays<void> held(const char* name, const py::object& objects, const py::object& outs) {
  return {"apply", name, objects, py::len(outs) == 0 ? Access::write : Access::read, Shape::vector, false, as_view};
}

struct CalibrateArrays {
  CalibrateArrays(const CalibrateOf& of, Codec codec)
      : kind(calibration_named(std::get<0>(of))),
        codec(codec),
        quantize_direction(std::get<8>(of)),
        num_clients(std::get<3>(of)),
        sum({"apply", "sum"}, std::get<1>(of), std::get<2>(of).is_none() ? Access::write : Access::read),
        rows("apply", "rows", std::get<4>(of), Access::read, Shape::vector, true,
             [codec](const Array& array) { return read_only(array.row(codec)); }),
        new_rows("apply", "new_rows", std::get<5>(of), Access::write, Shape::vector, true,
                 [codec](const Array& array) { return array.row(codec); }) {
    if (!std::get<2>(of).is_none()) sum_out.emplace(Argument{"apply", "sum_out"}, std::get<2>(of), Access::write);
    for (const auto& [key, low, high] : std::get<7>(of)) facts.push_back({key, low, high});
  }
  Calibrate stage() const {
    const List<RowFacts> all{facts.data(), static_cast<std::int64_t>(facts.size())};
    const View<double> to = sum_out ? sum_out->doubles() : View<double>{};
    return {kind, codec, sum.doubles(), num_clients, rows.list(), new_rows.list(), all, quantize_direction, to};
  }

  Calibration kind;
  Codec codec;
  bool quantize_direction;
  std::int64_t num_clients;
  Array sum;
  std::optional<Array> sum_out;
  Arrays<const unsigned char> rows;
  Arrays<unsigned char> new_rows;
  std::vector<RowFacts> facts;
};

struct MemoryArrays {
  explicit MemoryArrays(const MemoryOf& of)
      : vectors(held("memory.vectors", std::get<0>(of), std::get<1>(of))),
        outs(written("memory.outs", std::get<1>(of))),
        weights("memory.weights", std::get<2>(of)) {
    if (!std::get<3>(of).is_none()) next.emplace("memory.next", std::get<3>(of), Shape::any);
  }
  Memory stage() const { return {vectors.list(), weights.list(), next ? next->list() : List<double>{}, outs.list()}; }

  Arrays<void> vectors, outs;
  Numbers weights;
  std::optional<Numbers> next;
};

py::list all_bytes(const std::vector<std::vector<std::uint32_t>>& numbers) {
  py::list list;
  for (const auto& some : numbers) list.append(as_bytes(some));
  return list;
}

void apply_(const py::object& params, const py::object& out, const CombineOf& combine,
            const std::optional<CalibrateOf>& calibrate, const StepOf& step, const std::optional<MemoryOf>& memory,
            int num_threads, std::optional<py::list> done, std::optional<py::list> checksums, bool dry) {
  const Call call;
  const Array from({"apply", "params"}, params, Access::read), to({"apply", "out"}, out, Access::write);
  const auto& [updates, weights, params_weight] = combine;
  const Numbers weight("weights", weights);
  const Arrays<const void> vectors("apply", "updates", updates, Access::read, Shape::vector, false, as_view);
  const auto& [step_kind, lr, beta1, beta2, epsilon, root_scale, state_vectors, state_outs] = step;
  const Arrays<void> states = held("states", state_vectors, state_outs), outs = written("states_out", state_outs);
  std::optional<CalibrateArrays> cache;
  std::optional<MemoryArrays> memories;
  Pass pass;
  pass.params = from.view();
  pass.out = to.view();
  pass.combine = {vectors.list(), weight.list(), params_weight};
  if (calibrate) {
    const auto& codec = std::get<6>(*calibrate);
    const bool any = pass.combine.updates.size > 0;
    const Type updates = any ? pass.combine.updates.data[0].type : Type::float32;
    cache.emplace(*calibrate, codec ? codec_named(*codec) : exact_codec(updates));
    pass.calibrate = cache->stage();
  }
  pass.step = {step_named(step_kind), lr, beta1, beta2, epsilon, root_scale, states.list(), outs.list()};
  if (memory) pass.memory = memories.emplace(*memory).stage();
  bool finite = true;
  Checksums sums;
  {
    const Release release;
    finite = apply(pass, num_threads, dry, checksums ? &sums : nullptr);
  }
  if (checksums && !dry)
    checksums->append(py::make_tuple(as_bytes(sums.out), as_bytes(sums.sum), all_bytes(sums.rows),
                                     all_bytes(sums.states), all_bytes(sums.memories)));
  // Before Python can run a signal handler: an exception of one cannot hide from the caller that the sweep was made.
  if (done && !dry) done->append(finite);
}

}  // namespace

void bind_apply(py::module_& module) {
  module.def("apply", apply_, py::arg("params"), py::arg("out"), py::arg("combine"), py::arg("calibrate"),
             py::arg("step"), py::arg("memory"), py::arg("num_threads"), py::arg("done") = py::none(),
             py::arg("checksums") = py::none(), py::arg("dry") = false);
}

}  // namespace afflux::python
