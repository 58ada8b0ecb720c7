// The functions that an instruction set provides: serial, torch-free, scratch passed in. The glue
// brings threads.
#pragma once

#include <cstdint>

#include "../core/layers.h"
#include "../core/params.h"

namespace attention_ext {

// Tasks of rows(params) neighbouring rows of a unit, from first_row on.
template <class Params>
struct RowKernel {
  int64_t (*rows)(const Params& params);
  int64_t (*scratch)(const Params& params);
  void (*run)(const Params& params, int64_t unit, int64_t first_row, void* scratch);
};

// Tasks numbered from 0.
template <class Params>
struct TaskKernel {
  int64_t (*tasks)(const Params& params);
  int64_t (*scratch)(const Params& params);
  void (*run)(const Params& params, int64_t task, void* scratch);
};

// Each unit has parts(params, unit) parts, at most most_parts(params), fixed by its sizes alone.
// run() overwrites the accumulator (dK and dV of the unit) with one part's sums; the parts are
// added in order, the last one first, then stored. The run of a lone part may sum in the gradients
// themselves; then store() has nothing to do.
template <class Params>
struct PartKernel {
  int64_t (*most_parts)(const Params& params);
  int64_t (*parts)(const Params& params, int64_t unit);
  int64_t (*scratch)(const Params& params);
  void (*run)(const Params& params, int64_t unit, int64_t part, void* accumulator, void* scratch);
  void (*store)(const Params& params, int64_t unit, const void* accumulator);
};

// One accumulation type: float for float32, bfloat16 and float16 tensors, double for float64.
struct KernelTable {
  int64_t lanes;  // rows side by side; work is cut at multiples of it

  // Tasks of up to forward_rows(p) neighbouring rows of a unit, in any order and size.
  int64_t (*forward_rows)(const AttentionParams& p);
  int64_t (*forward_scratch)(const AttentionParams& p, int64_t rows);
  void (*forward)(const AttentionParams& p, int64_t unit, int64_t first_row, int64_t rows,
                  void* scratch);

  // Units with at most few_rows rows: tasks are chunks of keys, merged unit by unit from partial
  // results.
  int64_t few_rows;
  int64_t (*few_rows_chunks)(const AttentionParams& p);
  int64_t (*few_rows_scratch)(const AttentionParams& p);
  int64_t (*partial_bytes)(
      const AttentionParams& p);  // of one chunk; a unit's chunks follow each other
  void (*few_rows_chunk)(const AttentionParams& p, int64_t unit, int64_t chunk, void* partial,
                         void* scratch);
  void (*few_rows_merge)(const AttentionParams& p, int64_t unit, void* partials, void* scratch);

  RowKernel<WeightsParams> weights;
  RowKernel<TangentParams> tangent;
  PartKernel<GradParams> backward;
  PartKernel<TangentParams> backward_tangent;
  TaskKernel<MaskGradParams> mask_gradient;
  TaskKernel<MaskGradParams> mask_gradient_tangent;

  int64_t (*accumulator_bytes)(const AttentionParams& p);
  void (*add_accumulator)(const AttentionParams& p, void* into, const void* from);

  // Beside attention: any rows, each by itself. The norm's weight has a gradient for each block of
  // rows.
  void (*rotate)(const RotaryParams& r, const RotaryRows& rows);
  void (*rms_norm)(const RmsNormParams& p, int64_t first_row, int64_t rows);
  void (*rms_norm_backward)(const RmsNormParams& p, int64_t first_row, int64_t rows,
                            void* weight_sums);
  void (*add_weight_sums)(const RmsNormParams& p, const void* weight_sums, int64_t blocks);
  void (*swiglu)(const SwigluParams& p, int64_t first_row, int64_t rows);
  void (*swiglu_backward)(const SwigluParams& p, int64_t first_row, int64_t rows);
};

struct Kernels {
  const char* name;
  // Register-only float32 multiply-adds: the rate that a kernel can at most have.
  float (*multiply_adds)(int64_t rounds);
  int64_t multiply_adds_per_round;
  KernelTable float32;
  KernelTable float64;
};

}  // namespace attention_ext
