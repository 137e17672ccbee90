// Plain structs shared with binding.py (same order, same widths). All pointers are borrowed.
#pragma once
#include <cstdint>

// Where K and V of a sequence lie: page = 64-byte header, then per layer K as
// [kv_head, head_size, page_size] and V as [kv_head, page_size, head_size].
struct SkPages {
    uint8_t* region;
    int64_t page_bytes;
    int64_t page_size;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_size;
    int64_t bf16;  // element type of pages and matrices: 1 bf16, 0 fp32
};

// Matrices are packed (see gemm.h), vectors are fp32; optional ones may be null.
struct SkLayer {
    const float* input_norm;
    const void* qkv;
    const float* qkv_bias;  // padded to a multiple of 16
    const float* q_norm;
    const float* k_norm;
    const void* o;
    const float* attention_out_norm;
    const float* mlp_norm;
    const void* gate_up;  // panels alternate: 16 columns of gate, the same 16 of up
    const void* down;
    const float* mlp_out_norm;
};

struct SkModel {
    SkPages pages;
    int64_t hidden;
    int64_t intermediate;
    int64_t layers;
    int64_t vocab;
    int64_t rotary_dim;
    int64_t rope_interleaved;
    float eps;
    float rope_factor;
    const float* inv_freq;   // [rotary_dim / 2]
    const void* embedding;   // [vocab, hidden], not packed
    const SkLayer* layer;
    const float* final_norm;
    const void* lm_head;
};

struct SkBatch {
    int64_t rows;
    int64_t sequences;
    int64_t pages_max;
    int64_t outputs;
    const int32_t* tokens;
    const int32_t* positions;
    const int32_t* sequence_starts;
    const int32_t* tables;
    const int32_t* logit_rows;
};
