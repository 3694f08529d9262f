/* afflux: the arithmetic of one server round of asynchronous federated learning, for C and for languages that call C.
 *
 * The functions are those of afflux/afflux.hpp, which describes them; here are their C forms. Every function returns
 * AFFLUX_OK or another status; afflux_last_error() then has the message. Arguments are checked before anything is
 * written, so after AFFLUX_INVALID and AFFLUX_UNAVAILABLE nothing has changed. Results have the same bits on any number
 * of threads and on any instruction set. All functions may be called by several threads at the same time.
 *
 * The structs describe the caller's memory; the library keeps no pointer to them. Zero bytes are a valid default of
 * every field, except in afflux_pass (afflux_pass_init) and `scale`.
 *
 * AFFLUX_ABI changes if a layout or the meaning of a function changes. A program compares it once with the library's:
 *     if (afflux_abi() != AFFLUX_ABI) ...
 */
#ifndef AFFLUX_H
#define AFFLUX_H
#include <stdint.h>

#define AFFLUX_ABI 1

#if defined(__GNUC__)
#define AFFLUX_API __attribute__((visibility("default")))
#else
#define AFFLUX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a function returns. */
enum {
  AFFLUX_OK = 0,
  AFFLUX_INVALID = 1,     /* arguments that are invalid or do not fit together */
  AFFLUX_UNAVAILABLE = 2, /* a device or an instruction set that is not in this build, or not on this machine */
  AFFLUX_NO_MEMORY = 3,
  AFFLUX_FAILED = 4 /* another error, such as one of CUDA */
};

enum { AFFLUX_CPU = 0, AFFLUX_CUDA = 1 };
enum { AFFLUX_FLOAT32 = 0, AFFLUX_FLOAT64 = 1, AFFLUX_FLOAT16 = 2, AFFLUX_BFLOAT16 = 3 };
enum { AFFLUX_UPDATE = 0, AFFLUX_GRADIENT = 1, AFFLUX_MODEL = 2 };
enum { AFFLUX_NO_CALIBRATION = 0, AFFLUX_CACHED_DIFFERENCE = 1, AFFLUX_CACHED_MEAN = 2 };
enum {
  AFFLUX_SGD = 0,
  AFFLUX_MOMENTUM = 1,
  AFFLUX_ADAM = 2,
  AFFLUX_AMSGRAD = 3,
  AFFLUX_ADAGRAD = 4,
  AFFLUX_YOGI = 5,
  AFFLUX_ASSIGN = 6,
  AFFLUX_NESTEROV = 7
};

typedef struct {
  int32_t kind; /* AFFLUX_CPU or AFFLUX_CUDA */
  int32_t index;
} afflux_device;

/* Control: what a client's duplicates do, and the outcomes of a push (engine/control/control.hpp). */
enum { AFFLUX_BOTH = 0, AFFLUX_LATEST = 1, AFFLUX_REJECT = 2 };
enum {
  AFFLUX_JOINED = 0,     /* it is in the buffer */
  AFFLUX_REPLACED = 1,   /* as joined, in the place of an earlier arrival of its client */
  AFFLUX_SUPERSEDED = 2, /* the buffer holds an arrival of its client from a newer version */
  AFFLUX_REJECTED = 3,   /* the buffer holds an arrival of its client, or the client has entered in this pass, or was
                            in as many rounds as it may */
  AFFLUX_DROPPED = 4,    /* older than max_staleness */
  AFFLUX_EMPTY = 5,      /* trained on no examples */
  AFFLUX_REFUSED = 8,    /* afflux_control_push returned AFFLUX_INVALID */
  AFFLUX_STATUSES = 9
};

struct afflux_parts;

/* A vector of `size` elements of `type`: contiguous at `data`, or in pieces (`parts`, with `data` null). */
typedef struct {
  void* data;
  int64_t size;
  afflux_device device;
  int32_t type;
  const struct afflux_parts* parts;
} afflux_view;

/* Memory with elements of a fixed type: float64 for sums and products, bytes for rows. */
typedef struct {
  void* data;
  int64_t size;
  afflux_device device;
} afflux_memory;

/* One piece of a vector (afflux/parts.hpp). */
typedef struct {
  void* data;
  int64_t size;
  int32_t type;
} afflux_part;

/* Lists: `size` items at `data`. */
typedef struct {
  const afflux_view* data;
  int64_t size;
} afflux_views;
typedef struct {
  const afflux_memory* data;
  int64_t size;
} afflux_memories;
typedef struct {
  const double* data;
  int64_t size;
} afflux_numbers;
typedef struct {
  const int64_t* data;
  int64_t size;
} afflux_integers;
typedef struct {
  const afflux_part* data;
  int64_t size;
} afflux_part_list;

/* What a client sends, and what the rule takes: update = model - base, gradient = -update / scale. */
typedef struct {
  int32_t from, to; /* AFFLUX_UPDATE, AFFLUX_GRADIENT or AFFLUX_MODEL */
  afflux_view base;
  double scale;
} afflux_conversion;

/* A vector in pieces: `borders` are the indices at which they begin, and then the size of the vector. */
typedef struct afflux_parts {
  afflux_integers borders;
  afflux_part_list list;
  const afflux_conversion* conversion; /* or null */
} afflux_parts;

typedef struct {
  double sum_of_squares, min, max;
  int64_t first_nonfinite; /* -1: all values are finite */
} afflux_statistics;

typedef struct {
  int32_t coding, bits; /* afflux_codec_named() sets them */
} afflux_codec;

typedef struct {
  uint64_t key;     /* of the random bits: every row that is stored must have another one */
  double low, high; /* the smallest and the largest element */
} afflux_row_facts;
typedef struct {
  const afflux_row_facts* data;
  int64_t size;
} afflux_row_facts_list;

/* Normal noise (afflux/pass.hpp). Draw a new nonce for each pass with the same key. */
typedef struct {
  double sigma; /* the standard deviation in the direction; 0: none */
  uint32_t key[8], nonce[3];
  int64_t first;       /* the index of element 0 in the whole vector */
  afflux_numbers next; /* the coefficients in the new rule vectors; empty: none */
} afflux_noise;

/* Stage 1: the weighted sum of the updates (afflux/pass.hpp). */
typedef struct {
  afflux_views updates;
  afflux_numbers weights;
  double params_weight;
  double most; /* the largest valid absolute value; infinity: no limit */
  double trim; /* the share of the weights that is cut at both ends, element by element; 0: none */
  afflux_noise noise;
} afflux_combine;

/* Stage 2: the cached rows of clients. */
typedef struct {
  int32_t kind;
  afflux_codec codec;
  afflux_memory sum; /* float64 */
  int64_t num_clients;
  afflux_memories rows, new_rows; /* bytes */
  afflux_row_facts_list facts;
  uint8_t quantize_direction; /* 0 or 1 */
  afflux_memory sum_out;      /* float64 */
  double factor;              /* of rows in the direction: 1, or from 0 to 1 */
} afflux_calibrate;

/* Stage 3: the step (afflux/step.hpp). */
typedef struct {
  int32_t kind;
  double lr, beta1, beta2, epsilon, root_scale;
  afflux_views states, outs;
} afflux_step;

/* Vectors that the server keeps between rounds. */
typedef struct {
  afflux_views vectors;
  afflux_numbers weights, next;
  afflux_views outs;
} afflux_rule_vectors;

/* One round. afflux_pass_init() sets the defaults: no updates, no rows, SGD with lr 1, no limits. */
typedef struct {
  afflux_view params, out;
  afflux_combine combine;
  afflux_calibrate calibrate;
  afflux_step step;
  afflux_rule_vectors rule_vectors;
  double most;
} afflux_pass;

/* The vectors x_k = vectors[k] + shift * memory, and e = memory_weight * memory + sum_k weights[k] * x_k; without
 * weights (null data) there is no e (afflux/inner.hpp). */
typedef struct {
  afflux_views vectors;
  afflux_numbers weights;
  afflux_view memory;
  double shift, memory_weight;
} afflux_inner_terms;

/* The decisions of a server about pushes, with numbers in the place of vectors. Not for several threads at once. */
typedef struct afflux_control afflux_control;

typedef struct {
  int64_t buffer_size;      /* arrivals of a round, at least 1 */
  int32_t duplicates;       /* AFFLUX_BOTH, AFFLUX_LATEST or AFFLUX_REJECT */
  uint8_t by_flush;         /* 1: no push completes a round */
  uint8_t limits_staleness; /* 1: pushes that are older than max_staleness are dropped */
  int64_t max_staleness;
  int64_t pass_clients;   /* rules that take every client once per pass: the clients of a pass; 0: no passes */
  int64_t participations; /* rounds that a client may be in, without passes and AFFLUX_BOTH; 0: any number */
} afflux_control_settings;

typedef struct {
  const char* text;    /* an id in UTF-8; null: `number` is the id */
  int64_t number;      /* with is_unsigned: the bits of a uint64_t */
  uint8_t is_unsigned; /* 0 or 1 */
} afflux_client;

typedef struct {
  afflux_client client;
  int64_t version; /* that the client pulled; -1 - s: it has the staleness s */
  int64_t examples, local_steps;
  double loss, norm;
  int64_t slot; /* of the vector: any number of the caller */
} afflux_push;

typedef struct {
  int32_t status;    /* AFFLUX_JOINED, ... */
  uint8_t completes; /* 1: the buffer is a round now, which must be decided before the next push */
  int64_t staleness; /* -1: unknown */
  int64_t version;   /* the newest one */
  int64_t join;      /* the number of the decision; -1: the push is empty or refused */
  int64_t step;      /* the version that the arrival's round makes; -1: it is in no buffer */
  int64_t freed;     /* the slot of the arrival that this one has replaced; -1: there is none */
} afflux_decision;

/* The arrivals in the buffer, in an order that does not depend on when they came: by client, version and join. */
typedef struct {
  int64_t size;
  const int64_t *slots, *versions, *stalenesses, *joins, *examples, *local_steps;
  const double *losses, *norms;
} afflux_arrivals;

/* Versions. afflux_version() is that of the package, as "0.1.0"; afflux_order_version() that of the order of sums. */
AFFLUX_API int32_t afflux_abi(void);
AFFLUX_API const char* afflux_version(void);
AFFLUX_API int32_t afflux_order_version(void);

/* The message of the last failed call of this thread; valid until the thread's next call. */
AFFLUX_API const char* afflux_last_error(void);

/* Copies a client's vector into a slot; `conversion` may be null. afflux_ingest_parts takes it in many views.
   The vector may be on the host, and the slot on a GPU. */
AFFLUX_API int afflux_ingest(const afflux_view* update, const afflux_view* slot, int num_threads,
                             const afflux_conversion* conversion, int64_t until_read, afflux_statistics* statistics);
AFFLUX_API int afflux_ingest_parts(const afflux_views* parts, const afflux_view* slot, int num_threads,
                                   const afflux_conversion* conversion, int64_t until_read,
                                   afflux_statistics* statistics);

/* out[i * K + j] = <vectors[i], vectors[j]>; K * K float64. */
AFFLUX_API int afflux_gram(const afflux_views* vectors, const afflux_memory* out, int num_threads);
/* out[k] = <x_k, x_k> and, with an e, out[K] = <e, e> and out[K + 1 + k] = <x_k, e>. */
AFFLUX_API int afflux_inner(const afflux_inner_terms* terms, const afflux_memory* out, int num_threads);

AFFLUX_API void afflux_pass_init(afflux_pass* pass);
/* Executes the pass. *valid: 1 if all results are finite and within the limits. With `dry`, it only checks. */
AFFLUX_API int afflux_apply(const afflux_pass* pass, int num_threads, int dry, int* valid);

/* Codecs of rows: "float32", "affine-4", "rotated-2", ... */
AFFLUX_API int afflux_codec_named(const char* name, afflux_codec* codec);
AFFLUX_API int afflux_row_bytes(afflux_codec codec, int64_t size, int64_t* bytes);
AFFLUX_API int afflux_encode(afflux_codec codec, const afflux_view* vector, const afflux_memory* row, int num_threads,
                             const afflux_row_facts* facts);
AFFLUX_API int afflux_decode(afflux_codec codec, const afflux_memory* row, const afflux_view* vector, int num_threads);

/* Elementary functions with the same bits on every machine. */
AFFLUX_API double afflux_exp(double x);
AFFLUX_API double afflux_log(double x);
AFFLUX_API double afflux_pow(double x, double y);

/* Control of a server whose weights and sweeps are the caller's. A round: afflux_control_arrivals, weights by their
 * facts, afflux_control_decide_round, afflux_apply over their slots, afflux_control_commit. A decided round counts in
 * the staleness of later pushes. */
AFFLUX_API int afflux_control_create(const afflux_control_settings* settings, afflux_control** control);
AFFLUX_API void afflux_control_destroy(afflux_control* control); /* null: nothing */
AFFLUX_API int afflux_control_push(afflux_control* control, const afflux_push* push, afflux_decision* decision);
/* The arrays are valid until the next call with this control. */
AFFLUX_API int afflux_control_arrivals(afflux_control* control, afflux_arrivals* arrivals);
/* Empties the buffer. Its arrivals are a round, whatever their number; steps = 0: one that makes no version. */
AFFLUX_API int afflux_control_decide_round(afflux_control* control, int steps);
/* The same, and a new pass begins; without arrivals there is no round: *decided = 0. */
AFFLUX_API int afflux_control_end_pass(afflux_control* control, int steps, int* decided);
/* Empties the buffer; *count arrivals are discarded. */
AFFLUX_API int afflux_control_discard(afflux_control* control, int64_t* count);
/* The version of the decided round is the newest one. */
AFFLUX_API int afflux_control_commit(afflux_control* control);
/* counts[AFFLUX_STATUSES], by status: all pushes, and those since the last round was decided; each may be null. */
AFFLUX_API int afflux_control_counts(const afflux_control* control, int64_t* counts, int64_t* since_round);
AFFLUX_API int64_t afflux_control_version(const afflux_control* control); /* the newest one */

/* Chooses the instruction set of all later calls of the process: "avx512", "avx2", "baseline" or "neon". */
AFFLUX_API int afflux_choose_isa(const char* name);
/* The name of the instruction set that is in use; null if AFFLUX_ISA names none that runs here. */
AFFLUX_API const char* afflux_isa(void);

#ifdef __cplusplus
}
#endif
#endif
