// The functions that an instruction set provides: serial, torch-free, scratch passed in. The glue brings threads.
#pragma once

#include <cstdint>

#include "../core/params.h"

namespace attention_ext {

// One accumulation type: float for float32, bfloat16 and float16 tensors, double for float64.
struct KernelTable {
  int64_t lanes;  // rows side by side; work is cut at multiples of it

  // Forward: tasks of up to forward_rows(p) neighbouring rows of a unit, in any order and size.
  int64_t (*forward_rows)(const AttentionParams& p);
  int64_t (*forward_scratch)(const AttentionParams& p, int64_t rows);
  void (*forward)(const AttentionParams& p, int64_t unit, int64_t first_row, int64_t rows, void* scratch);

  // Backward: each unit has backward_parts(g) parts, fixed by its sizes. backward() overwrites the accumulator
  // (dK and dV of the unit) with one part's sums; the parts are added in order, then stored.
  int64_t (*backward_parts)(const GradParams& g);
  int64_t (*backward_scratch)(const GradParams& g);
  int64_t (*accumulator_bytes)(const GradParams& g);
  void (*backward)(const GradParams& g, int64_t unit, int64_t part, void* accumulator, void* scratch);
  void (*add_accumulator)(const GradParams& g, void* into, const void* from);
  void (*store_accumulator)(const GradParams& g, int64_t unit, const void* accumulator);
};

struct Kernels {
  const char* name;
  KernelTable float32;
  KernelTable float64;
};

}  // namespace attention_ext
