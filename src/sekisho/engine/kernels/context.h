// What outlives a call: the threads and the scratch memory.
#pragma once
#include <cstdlib>
#include <new>
#include <vector>

#include "abi.h"
#include "pool.h"

constexpr int64_t HEADER_BYTES = 64;
constexpr int QUERIES_MAX = 64;  // query rows times heads of a group in one attention task

struct RowBlock {
    int64_t sequence, begin, end;
};

struct Context {
    explicit Context(int threads) : pool(threads) {}
    ~Context() { std::free(memory_); }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // Cuts the rows of each sequence into blocks that attention handles together.
    void plan(const SkBatch& batch, const SkPages& pages) {
        const int64_t group = pages.heads / pages.kv_heads;
        const int64_t most = group > QUERIES_MAX / 2 ? 1 : QUERIES_MAX / group;
        row_blocks.clear();
        for (int64_t s = 0; s < batch.sequences; ++s) {
            const int64_t end = batch.sequence_starts[s + 1];
            for (int64_t row = batch.sequence_starts[s]; row < end; row += most)
                row_blocks.push_back({s, row, row + most < end ? row + most : end});
        }
    }

    // At least `floats` floats, 64-byte aligned; the contents are undefined.
    float* memory(int64_t floats) {
        if (floats > capacity_) {
            std::free(memory_);
            capacity_ = 0;
            memory_ = static_cast<float*>(
                std::aligned_alloc(64, static_cast<size_t>(floats + 15) / 16 * 64));
            if (memory_ == nullptr) throw std::bad_alloc();
            capacity_ = floats;
        }
        return memory_;
    }

    // A thread's own room for the weighted V of one attention task.
    float* sums(int thread, int64_t head_size) const {
        return sums_start + thread * QUERIES_MAX * head_size;
    }

    Pool pool;
    std::vector<RowBlock> row_blocks;
    float* sums_start = nullptr;

private:
    float* memory_ = nullptr;
    int64_t capacity_ = 0;
};
