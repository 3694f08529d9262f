/* A program in C against afflux.h: FedBuff, gram, inner, an encoded row, an error. Prints what test_c.py compares. */
#include <afflux.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 70001 };

static float* lcg_vector(uint32_t seed) {
  float* values = malloc(SIZE * sizeof *values);
  uint32_t state = seed;
  for (int i = 0; i < SIZE; ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = (float)(int32_t)state * 9.31322574615478515625e-10f;
  }
  return values;
}

static uint32_t checksum(const void* data, size_t bytes) {
  uint32_t total = 0;
  for (size_t i = 0; i + 4 <= bytes; i += 4) {
    uint32_t word;
    memcpy(&word, (const char*)data + i, 4);
    total = total * 31u + word;
  }
  return total;
}

static afflux_view view_of(float* data) {
  afflux_view view = {0};
  view.data = data;
  view.size = SIZE;
  return view; /* float32 on the CPU */
}

static void check(int status) {
  if (status == AFFLUX_OK) return;
  fprintf(stderr, "status %d: %s\n", status, afflux_last_error());
  exit(1);
}

int main(void) {
  float *params = lcg_vector(1), *first = lcg_vector(2), *second = lcg_vector(3), *out = lcg_vector(4);
  double weights[] = {0.5, 0.5}, products[5];
  afflux_view updates[2];
  afflux_memory memory = {products, 4, {AFFLUX_CPU, 0}};
  afflux_pass pass;
  afflux_inner_terms terms = {0};
  afflux_statistics statistics;
  afflux_row_facts facts = {7, 0.0, 0.0};
  afflux_codec codec;
  afflux_view slot = view_of(out);
  int64_t bytes = 0;
  int valid = 0;

  if (afflux_abi() != AFFLUX_ABI) return 1;
  printf("version %s\norder_version %d\nisa %s\n", afflux_version(), (int)afflux_order_version(), afflux_isa());

  updates[0] = view_of(first);
  updates[1] = view_of(second);
  check(afflux_ingest(&updates[0], &slot, 1, NULL, 0, &statistics));
  printf("ingest %a %lld\n", statistics.sum_of_squares, (long long)statistics.first_nonfinite);

  afflux_pass_init(&pass);
  pass.params = view_of(params);
  pass.out = slot;
  pass.combine.updates.data = updates;
  pass.combine.updates.size = 2;
  pass.combine.weights.data = weights;
  pass.combine.weights.size = 2;
  pass.step.lr = 0.7;
  check(afflux_apply(&pass, 2, 0, &valid));
  printf("apply %d %08x\n", valid, (unsigned)checksum(out, SIZE * sizeof *out));

  {
    const afflux_views both = {updates, 2};
    check(afflux_gram(&both, &memory, 1));
    printf("gram %a %a\n", products[0], products[1]);
    terms.vectors = both;
    terms.weights.data = weights;
    terms.weights.size = 2;
    memory.size = 5;
    check(afflux_inner(&terms, &memory, 1));
    printf("inner %a %a\n", products[2], products[3]);
  }

  check(afflux_codec_named("affine-4", &codec));
  check(afflux_row_bytes(codec, SIZE, &bytes));
  {
    uint64_t* row = calloc((size_t)bytes / 8 + 1, 8);
    const afflux_memory target = {row, bytes, {AFFLUX_CPU, 0}};
    check(afflux_encode(codec, &updates[0], &target, 1, &facts));
    check(afflux_decode(codec, &target, &slot, 1));
    printf("row %lld %08x %08x\n", (long long)bytes, (unsigned)checksum(row, (size_t)bytes),
           (unsigned)checksum(out, SIZE * sizeof *out));
    free(row);
  }
  printf("pow %a\n", afflux_pow(0.1, 0.3));

  pass.combine.weights.size = 1;
  printf("status %d\n", afflux_apply(&pass, 1, 0, &valid));
  printf("error %s\n", afflux_last_error());
  pass.step.kind = 99;
  printf("kind %d ", afflux_apply(&pass, 1, 0, &valid));
  printf("%s\n", afflux_last_error());
  codec.coding = 99;
  printf("codec %d\n", afflux_row_bytes(codec, SIZE, &bytes));
  free(params), free(first), free(second), free(out);
  return 0;
}
