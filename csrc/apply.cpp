#include "apply.hpp"

#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "afflux/afflux.hpp"
#include "arrays.hpp"
#include "attributes.hpp"
#include "checksums.hpp"
#include "foreign.hpp"
#include "release.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// The attributes of the classes of afflux.ops: Pass, Combine, the calibrations with their codec, the steps, and
// RuleVectors.
struct Attributes {
  Attribute params{"params"}, out{"out"}, combine{"combine"}, calibrate{"calibrate"}, step{"step"}, states{"states"},
      states_out{"states_out"}, rule_vectors{"rule_vectors"};
  Attribute updates{"updates"}, weights{"weights"}, params_weight{"params_weight"}, most{"most"}, trim{"trim"},
      noise{"noise"};
  Attribute sigma{"sigma"}, key{"key"}, nonce{"nonce"}, first{"first"};
  Attribute kind{"kind"}, sum{"sum"}, sum_out{"sum_out"}, num_clients{"num_clients"}, rows{"rows"},
      new_rows{"new_rows"}, codec{"codec"}, name{"name"}, facts{"facts"}, quantize_direction{"quantize_direction"},
      factor{"factor"};
  Attribute lr{"lr"}, beta1{"beta1"}, beta2{"beta2"}, epsilon{"epsilon"}, root_scale{"root_scale"};
  Attribute vectors{"vectors"}, outs{"outs"}, next{"next"}, shape{"shape"};
};
const Attributes* attributes = nullptr;  // made with the module, kept for the process

Calibration calibration_named(const std::string& name) {
  if (name == "cached_difference") return Calibration::cached_difference;
  if (name == "cached_mean") return Calibration::cached_mean;
  throw Error("[apply] calibration '" + name + "' is unknown");
}

StepKind step_named(const std::string& name) {
  for (const StepInfo& kind : kStepKinds)
    if (name == kind.name) return static_cast<StepKind>(&kind - kStepKinds);
  throw Error("[apply] step '" + name + "' is unknown");
}

// An array of float64 on the host: weights or coefficients.
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

// Returns the vectors, for writing if there are no `outs`, else for reading.
Arrays<void> held(const char* name, const py::object& objects, const py::object& outs) {
  const auto title = [name] { return std::string("[apply] the vectors beside ") + name; };
  const bool in_place = read_foreign(title, [&] { return py::len(outs) == 0; });
  return {"apply", name, objects, in_place ? Access::write : Access::read, Shape::vector, false, as_view};
}

// Writes the words of bytes. A message says nothing of their values.
template <std::size_t kWords>
void read_words(const Attribute& attribute, const py::object& owner, std::uint32_t (&words)[kWords]) {
  const py::object bytes = attribute.of(owner);
  if (!PyBytes_Check(bytes.ptr()) || PyBytes_GET_SIZE(bytes.ptr()) != sizeof words)
    throw Error(std::string("[apply] noise.") + attribute.name() + " must be " + std::to_string(sizeof words) +
                " bytes");
  std::memcpy(words, PyBytes_AS_STRING(bytes.ptr()), sizeof words);
}

struct NoiseArrays {
  explicit NoiseArrays(const py::object& object) {
    if (object.is_none()) return;
    noise.sigma = attributes->sigma.number_of(object);
    read_words(attributes->key, object, noise.key);
    read_words(attributes->nonce, object, noise.nonce);
    noise.first = attributes->first.integer_of(object);
    const py::object numbers = attributes->next.of(object);
    if (!numbers.is_none()) noise.next = next.emplace("noise.next", numbers).list();
  }

  Noise noise;
  std::optional<Numbers> next;
};

struct CalibrateArrays {
  // Without a codec, rows have the type that stores `updates` without rounding: float64 or float32.
  CalibrateArrays(const py::object& stage, Type updates)
      : kind(calibration_named(attributes->kind.text_of(stage))),
        codec(codec_of(attributes->codec.of(stage), updates)),
        quantize_direction(attributes->quantize_direction.flag_of(stage)),
        num_clients(attributes->num_clients.integer_of(stage)),
        factor(attributes->factor.number_of(stage)),
        out(attributes->sum_out.of(stage)),
        sum({"apply", "sum"}, attributes->sum.of(stage), out.is_none() ? Access::write : Access::read),
        rows("apply", "rows", attributes->rows.of(stage), Access::read, Shape::vector, true,
             [this](const Array& array) { return read_only(array.row(codec)); }),
        new_rows("apply", "new_rows", attributes->new_rows.of(stage), Access::write, Shape::vector, true,
                 [this](const Array& array) { return array.row(codec); }) {
    if (!out.is_none()) sum_out.emplace(Argument{"apply", "sum_out"}, out, Access::write);
    const py::object all = attributes->facts.of(stage);
    read_foreign([] { return std::string("[apply] facts"); },
                 [&] {
                   for (const py::handle fact : all) {
                     const auto [key, low, high] = fact.cast<std::tuple<std::uint64_t, double, double>>();
                     facts.push_back({key, low, high});
                   }
                 });
  }
  Calibrate stage() const {
    const List<RowFacts> all{facts.data(), static_cast<std::int64_t>(facts.size())};
    const View<double> to = sum_out ? sum_out->doubles() : View<double>{};
    return {kind, codec, sum.doubles(), num_clients, rows.list(), new_rows.list(), all, quantize_direction, to, factor};
  }
  static Codec codec_of(const py::object& codec, Type updates) {
    return codec.is_none() ? exact_codec(updates) : codec_named(attributes->name.text_of(codec));
  }

  Calibration kind;
  Codec codec;
  bool quantize_direction;
  std::int64_t num_clients;
  double factor;
  py::object out;
  Array sum;
  std::optional<Array> sum_out;
  Arrays<const unsigned char> rows;
  Arrays<unsigned char> new_rows;
  std::vector<RowFacts> facts;
};

struct StepArrays {
  StepArrays(const py::object& step, const py::object& states, const py::object& outs)
      : step(step), states(held("states", states, outs)), outs(written("states_out", outs)) {}
  Step stage() const {
    const Attributes& of = *attributes;
    return {step_named(of.kind.text_of(step)),
            of.lr.number_of(step),
            of.beta1.number_of(step),
            of.beta2.number_of(step),
            of.epsilon.number_of(step),
            of.root_scale.number_of(step),
            states.list(),
            outs.list()};
  }

  const py::object& step;
  Arrays<void> states, outs;
};

struct RuleVectorArrays {
  RuleVectorArrays(const py::object& rule_vectors, std::int64_t updates)
      : all_outs(attributes->outs.of(rule_vectors)),
        vectors(held("rule_vectors.vectors", attributes->vectors.of(rule_vectors), all_outs)),
        outs(written("rule_vectors.outs", all_outs)),
        weights("rule_vectors.weights", attributes->weights.of(rule_vectors)) {
    const py::object numbers = attributes->next.of(rule_vectors);
    if (numbers.is_none()) return;
    const std::int64_t count = vectors.list().size;
    const py::object shape = attributes->shape.of(numbers);
    const py::tuple expected = py::make_tuple(count, count + updates);
    const auto title = [] { return std::string("[apply] rule_vectors.next"); };
    if (!read_foreign(title, [&] { return shape.equal(expected); }))
      throw Error("[apply] rule_vectors.next has shape " + std::string(py::str(shape)) + ", expected " +
                  std::string(py::str(expected)));
    next.emplace("rule_vectors.next", numbers, Shape::any);
  }
  RuleVectors stage() const {
    return {vectors.list(), weights.list(), next ? next->list() : List<double>{}, outs.list()};
  }

  py::object all_outs;
  Arrays<void> vectors, outs;
  Numbers weights;
  std::optional<Numbers> next;
};

py::list all_bytes(const std::vector<std::vector<std::uint32_t>>& numbers) {
  py::list list;
  for (const auto& words : numbers) list.append(as_bytes(words));
  return list;
}

// The arguments of a round, which are read once, and its arrays, which are held until the sweep is done.
class PassArrays {
 public:
  explicit PassArrays(const py::object& round)
      : params_({"apply", "params"}, attributes->params.of(round), Access::read),
        out_({"apply", "out"}, attributes->out.of(round), Access::write),
        combine_(attributes->combine.of(round)),
        step_(attributes->step.of(round)),
        weights_("weights", attributes->weights.of(combine_)),
        noise_(attributes->noise.of(combine_)),
        updates_("apply", "updates", attributes->updates.of(combine_), Access::read, Shape::vector, false, as_view),
        steps_(step_, attributes->states.of(round), attributes->states_out.of(round)) {
    const Attributes& of = *attributes;
    const py::object calibrate = of.calibrate.of(round), rule_vectors = of.rule_vectors.of(round);
    pass_.params = params_.view();
    pass_.out = out_.view();
    pass_.combine = {updates_.list(),
                     weights_.list(),
                     of.params_weight.number_of(combine_),
                     of.most.number_of(combine_),
                     of.trim.number_of(combine_),
                     noise_.noise};
    pass_.most = of.most.number_of(round);
    if (!calibrate.is_none()) {
      const bool any = pass_.combine.updates.size > 0;
      const Type type = any ? pass_.combine.updates.data[0].type : Type::float32;
      pass_.calibrate = cache_.emplace(calibrate, type).stage();
    }
    pass_.step = steps_.stage();
    if (!rule_vectors.is_none())
      pass_.rule_vectors = rule_vectors_.emplace(rule_vectors, pass_.combine.updates.size).stage();
  }
  PassArrays(const PassArrays&) = delete;
  PassArrays& operator=(const PassArrays&) = delete;

  Device device() const { return pass_.out.device; }
  void check() const {
    const GilRelease release;
    afflux::apply(pass_, 1, true, nullptr);
  }
  void apply(int num_threads, std::optional<py::list> done, std::optional<py::list> checksums) const {
    bool sound = true;
    Checksums sums;
    {
      const GilRelease release;
      sound = afflux::apply(pass_, num_threads, false, checksums ? &sums : nullptr);
    }
    if (checksums)
      checksums->append(py::make_tuple(as_bytes(sums.out), as_bytes(sums.sum), all_bytes(sums.rows),
                                       all_bytes(sums.states), all_bytes(sums.rule_vectors)));
    // `done` is set before Python can run a signal handler: an exception of a handler cannot hide from the caller that
    // the sweep is done.
    if (done) done->append(sound);
  }

 private:
  const Vector params_, out_;
  const py::object combine_, step_;
  const Numbers weights_;
  const NoiseArrays noise_;
  const Arrays<const void> updates_;
  const StepArrays steps_;
  std::optional<CalibrateArrays> cache_;
  std::optional<RuleVectorArrays> rule_vectors_;
  Pass pass_;
};

void apply_(const py::object& round, int num_threads, std::optional<py::list> done, std::optional<py::list> checksums) {
  const Call call;
  PassArrays(round).apply(num_threads, std::move(done), std::move(checksums));
}

// A checked round for a sweep on the CPU. A round on a GPU is rejected, because there other work may change the arrays
// after the check.
class PreparedPass {
 public:
  explicit PreparedPass(const py::object& round) : round_(round) {
    const Call call;
    arrays_ = std::make_unique<PassArrays>(round);
    arrays_->check();
  }
  void apply(const py::object& round, int num_threads, std::optional<py::list> done,
             std::optional<py::list> checksums) const {
    if (!round.is(round_)) throw Error("[apply] checked is not of this round, or was released");
    if (arrays_->device().kind != DeviceKind::cpu) throw Error("[apply] checked is of a round on a GPU");
    arrays_->apply(num_threads, std::move(done), std::move(checksums));
  }
  void release() {
    round_ = py::object();
    arrays_.reset();
  }

 private:
  py::object round_;  // null once it was released
  std::unique_ptr<PassArrays> arrays_;
};

}  // namespace

void bind_apply(py::module_& module) {
  attributes = new Attributes;
  py::class_<PreparedPass>(module, "PreparedPass")
      .def(py::init<const py::object&>(), py::arg("round"))
      .def("apply", &PreparedPass::apply, py::arg("round"), py::arg("num_threads"), py::arg("done"),
           py::arg("checksums") = py::none())
      .def("release", &PreparedPass::release);
  module.def("apply", apply_, py::arg("round"), py::arg("num_threads"), py::arg("done") = py::none(),
             py::arg("checksums") = py::none());
}

}  // namespace afflux::python
