/* Functions of the library for the Python extension of the same version; no part of afflux.h, and of no stable form. */
#ifndef AFFLUX_C_INTERNAL_H
#define AFFLUX_C_INTERNAL_H
#include "afflux.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const char *name, *device;
  int compiled, runs, chosen;
  const char* why_not;
} afflux_backend;

/* A vector whose checksums afflux_apply_summed reports. */
enum { AFFLUX_OUT = 0, AFFLUX_SUM = 1, AFFLUX_ROW = 2, AFFLUX_STATE = 3, AFFLUX_RULE_VECTOR = 4 };

/* Called by the library, with `user`; they must not throw. */
typedef void (*afflux_put_crcs)(void* user, int vector, int64_t index, const uint32_t* crcs, int64_t count);
typedef void (*afflux_put_backend)(void* user, const afflux_backend* backend);
typedef void (*afflux_put_codec)(void* user, afflux_codec codec, const char* name);
typedef void (*afflux_body)(void* user, int64_t index);

AFFLUX_API int afflux_apply_summed(const afflux_pass* pass, int num_threads, int dry, int* valid, afflux_put_crcs put,
                                   void* user);
/* `vectors` are `count` objects of afflux::Unflattened. */
AFFLUX_API int afflux_unflatten(const void* vectors, int64_t count, int num_threads, int dry);
AFFLUX_API int afflux_crc32c(const afflux_memory* data, int64_t block, int64_t head, int num_threads, int table,
                             afflux_put_crcs put, void* user);
AFFLUX_API int afflux_list_codecs(afflux_put_codec put, void* user);
AFFLUX_API int afflux_list_backends(afflux_put_backend put, void* user);
/* Texts are valid until the thread's next call. */
AFFLUX_API const char* afflux_why_not(afflux_device device);
AFFLUX_API void afflux_use_stream(void* stream);
/* `policy` is an object of afflux::Policy. */
AFFLUX_API int afflux_policy(void* policy);
AFFLUX_API int afflux_policy_of(const char* text, const char* asked_by, void* policy);
AFFLUX_API int afflux_choose_policy(const void* policy);
AFFLUX_API const char* afflux_policy_text(const void* policy);
AFFLUX_API const char* afflux_processor_family(void);
AFFLUX_API int afflux_strict_float_mode(void (*body)(void* user), void* user);
AFFLUX_API int afflux_awake_helpers(void);
AFFLUX_API int afflux_parallel_for_awake(int64_t count, int num_threads, afflux_body body, void* user);

#ifdef __cplusplus
}
#endif
#endif
