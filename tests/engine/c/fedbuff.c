/* A server in C: FedBuff with polynomial staleness over 1,000 pushes. Prints what test_c.py compares with
 * afflux.Server. */
#include <afflux.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 1000, PUSHES = 1000, BUFFER = 7 };
static float params[SIZE], slots[BUFFER][SIZE];
static uint32_t state = 1;

static uint32_t next_number(void) { return state = state * 1664525u + 1013904223u; }

static afflux_view view_of(float* data) {
  const afflux_view view = {data, SIZE, {AFFLUX_CPU, 0}, AFFLUX_FLOAT32, NULL};
  return view;
}

static void check(int status) {
  if (status == AFFLUX_OK) return;
  fprintf(stderr, "status %d: %s\n", status, afflux_last_error());
  exit(1);
}

/* The round of the buffer, in place: x += 1/M sum_i (1 + staleness_i)^-0.3 u_i. */
static void make_round(afflux_control* control) {
  afflux_arrivals arrivals;
  afflux_view updates[BUFFER];
  double weights[BUFFER];
  afflux_pass pass;
  int valid = 0;
  check(afflux_control_arrivals(control, &arrivals));
  for (int64_t i = 0; i < arrivals.size; ++i) {
    updates[i] = view_of(slots[arrivals.slots[i]]);
    weights[i] = afflux_pow(1.0 + (double)arrivals.stalenesses[i], -0.3) / (double)arrivals.size;
  }
  afflux_pass_init(&pass);
  pass.params = pass.out = view_of(params);
  pass.combine.updates.data = updates;
  pass.combine.weights.data = weights;
  pass.combine.updates.size = pass.combine.weights.size = arrivals.size;
  pass.step.lr = 1.0;
  check(afflux_control_decide_round(control, 1));
  check(afflux_apply(&pass, 1, 0, &valid) || !valid);
  check(afflux_control_commit(control));
}

int main(void) {
  const afflux_control_settings settings = {BUFFER, AFFLUX_BOTH, 0, 1, /*max_staleness=*/5, 0, 0};
  afflux_control* control;
  int64_t waiting = 0, counts[AFFLUX_STATUSES];
  uint32_t digest = 0, words[SIZE];
  check(afflux_control_create(&settings, &control));
  for (int i = 0; i < PUSHES; ++i) {
    const uint32_t client = next_number() >> 28, stale = (next_number() >> 24) % 7;
    const int64_t version = afflux_control_version(control) - (int64_t)stale;
    const afflux_client id = {client == 0 ? "ann" : client == 1 ? "bob" : NULL, client, 0};
    const afflux_push push = {id, version < 0 ? 0 : version, 1, 0, 0.0, 0.0, waiting};
    afflux_decision decision;
    for (int k = 0; k < SIZE; ++k) slots[waiting][k] = (float)(int32_t)next_number() * 9.31322574615478515625e-10f;
    check(afflux_control_push(control, &push, &decision));
    if (decision.status == AFFLUX_JOINED) ++waiting;
    if (!decision.completes) continue;
    make_round(control);
    waiting = 0;
  }
  memcpy(words, params, sizeof words);
  for (int k = 0; k < SIZE; ++k) digest = digest * 31u + words[k];
  check(afflux_control_counts(control, counts, NULL));
  printf("%08x %d %d %d\n", (unsigned)digest, (int)afflux_control_version(control), (int)counts[AFFLUX_JOINED],
         (int)counts[AFFLUX_DROPPED]);
  afflux_control_destroy(control);
  return 0;
}
