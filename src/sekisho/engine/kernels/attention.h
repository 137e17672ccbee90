// Paged causal attention with grouped heads. A query row walks the tokens of its own sequence in
// blocks of 16, in order: scores with the tokens in lanes (one chain of fused multiply-adds over
// the head), softmax rescaled block by block, then V token by token with the head in lanes. The
// order does not depend on the other rows nor on the page size. Tokens after the row's position
// are dropped by a select or never read into a sum: an unfilled slot may hold anything.

struct Attention {
    SkPages pages;
    int64_t layer;
    const float* q;  // [rows, q_stride], heads first in each row
    int64_t q_stride;
    float* out;  // [rows, heads * head_size]
};

// Query rows of one sequence that share each load of a page, for one kv head, and their state:
// running maximum, 16 partial sums of the softmax, and the weighted V.
struct QueryBlock {
    const float* q[QUERIES_MAX];
    int32_t position[QUERIES_MAX];
    float max[QUERIES_MAX];
    float total[QUERIES_MAX][16];
    float* out;  // [count, head_size]
    int count;
};

// 16 tokens of a page.
template <class W>
struct TokenBlock {
    int64_t first;  // position
    const W* k;     // [head_size], k_stride apart, of 16 tokens each
    const W* v;     // [16, head_size]
    int64_t k_stride;
    int64_t head_size;
    float scale;
};

// Pages are scattered, so no hardware prefetcher sees the next one coming.
template <class W>
inline void fetch(const TokenBlock<W>& tokens) {
    for (int64_t d = 0; d < tokens.head_size; ++d) prefetch(tokens.k + d * tokens.k_stride);
    constexpr int64_t LINE = 64 / sizeof(W);
    for (int64_t i = 0; i < 16 * tokens.head_size; i += LINE) prefetch(tokens.v + i);
}

template <int N, class W>
inline void scores(const float* const* q, const TokenBlock<W>& tokens, F16* out) {
    F16 sum[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) sum[i] = set1(0.0f);
    const W* k = tokens.k;
    for (int64_t d = 0; d < tokens.head_size; ++d, k += tokens.k_stride) {
        const F16 column = load(k);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) sum[i] = fma(set1(q[i][d]), column, sum[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) out[i] = mul(sum[i], set1(tokens.scale));
}

// Adds weight times V, token by token: the first `all` tokens count for every query, then each
// query goes on alone to its own `valid`.
template <int N, class W>
inline void weigh(const float (*weight)[16], const int* valid, int all, const TokenBlock<W>& tokens,
                  float* out) {
    const int64_t head_size = tokens.head_size;
    for (int64_t d = 0; d < head_size; d += 16) {
        const W* v = tokens.v + d;
        F16 sum[N];
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) sum[i] = load(out + i * head_size + d);
        for (int t = 0; t < all; ++t) {
            const F16 value = load(v + t * head_size);
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) sum[i] = fma(set1(weight[i][t]), value, sum[i]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            for (int t = all; t < valid[i]; ++t)
                sum[i] = fma(set1(weight[i][t]), load(v + t * head_size), sum[i]);
            store(out + i * head_size + d, sum[i]);
        }
    }
}

// One block of tokens for the N queries from `first` on.
template <int N, class W>
void attend_tile(QueryBlock& block, int first, const TokenBlock<W>& tokens) {
    const int64_t head_size = tokens.head_size;
    float* const out = block.out + first * head_size;
    F16 score[N];
    float weight[N][16];
    int valid[N], all = 16;
    scores<N, W>(block.q + first, tokens, score);
    for (int i = 0; i < N; ++i) {
        const int64_t ahead = block.position[first + i] + 1 - tokens.first;
        valid[i] = ahead < 16 ? static_cast<int>(ahead) : 16;
        all = valid[i] < all ? valid[i] : all;
        const float before = block.max[first + i];
        const float here = max_lanes(keep_below(score[i], valid[i], set1(-__builtin_inff())));
        const float now = here > before ? here : before;
        F16 sum = load(block.total[first + i]);
        if (now != before) {
            const F16 shrink = set1(exp(before - now));
            sum = mul(sum, shrink);
            for (float* o = out + i * head_size; o < out + (i + 1) * head_size; o += 16)
                store(o, mul(load(o), shrink));
            block.max[first + i] = now;
        }
        const F16 part = keep_below(exp(sub(score[i], set1(now))), valid[i], set1(0.0f));
        store(weight[i], part);
        store(block.total[first + i], add(sum, part));
    }
    weigh<N, W>(weight, valid, all, tokens, out);
}

template <class W>
void attend_tokens(QueryBlock& block, int first, const TokenBlock<W>& tokens) {
    for (; first + 6 <= block.count; first += 6) attend_tile<6, W>(block, first, tokens);
    switch (block.count - first) {
        case 5: attend_tile<5, W>(block, first, tokens); break;
        case 4: attend_tile<4, W>(block, first, tokens); break;
        case 3: attend_tile<3, W>(block, first, tokens); break;
        case 2: attend_tile<2, W>(block, first, tokens); break;
        case 1: attend_tile<1, W>(block, first, tokens); break;
        default: break;
    }
}

// Rows of one sequence (rows.begin..rows.end) for one kv head; `sums` has room for
// QUERIES_MAX * head_size floats.
template <class W>
void attend(const Attention& a, const SkBatch& batch, const RowBlock& rows, int64_t kv_head,
            float* sums) {
    const SkPages& pages = a.pages;
    const int64_t size = pages.head_size, group = pages.heads / pages.kv_heads;
    const int64_t half = pages.kv_heads * size * pages.page_size;
    const int32_t* const table = batch.tables + rows.sequence * batch.pages_max;
    QueryBlock block;
    block.out = sums;
    block.count = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row)
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h, ++block.count) {
            block.q[block.count] = a.q + row * a.q_stride + h * size;
            block.position[block.count] = batch.positions[row];
            block.max[block.count] = -__builtin_inff();
        }
    __builtin_memset(block.total, 0, sizeof block.total);
    __builtin_memset(sums, 0, static_cast<size_t>(block.count * size) * sizeof(float));
    const float scale = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(size)));
    const auto at = [&](int64_t token) {
        const uint8_t* page = pages.region + table[token / pages.page_size] * pages.page_bytes;
        const int64_t slot = token % pages.page_size;
        const W* const k = reinterpret_cast<const W*>(page + HEADER_BYTES) + 2 * a.layer * half +
                           kv_head * size * pages.page_size + slot;
        return TokenBlock<W>{token, k, k + half + slot * (size - 1), pages.page_size, size, scale};
    };
    const int64_t last = batch.positions[rows.end - 1];
    int first = 0;  // the queries before it end before the current token
    TokenBlock<W> tokens = at(0);
    while (true) {
        while (block.position[first] < tokens.first) ++first;
        const bool more = tokens.first + 16 <= last;
        const TokenBlock<W> next = more ? at(tokens.first + 16) : tokens;
        if (more) fetch(next);
        attend_tokens<W>(block, first, tokens);
        if (!more) break;
        tokens = next;
    }
    for (int i = 0; i < block.count; ++i) {
        const F16 whole = set1(sum_lanes(load(block.total[i])));
        float* out = a.out + (rows.begin + i / group) * pages.heads * size +
                     (kv_head * group + i % group) * size;
        for (int64_t d = 0; d < size; d += 16)
            store(out + d, div(load(sums + i * size + d), whole));
    }
}

// Called by every thread of the pool. Ends with a barrier.
template <class W>
void attention(Context& context, const Attention& a, const SkBatch& batch, int thread) {
    const auto& blocks = context.row_blocks;
    const int64_t kv_heads = a.pages.kv_heads;
    const int64_t tasks = static_cast<int64_t>(blocks.size()) * kv_heads;
    for (int64_t task; (task = context.pool.take()) < tasks;)
        attend<W>(a, batch, blocks[static_cast<size_t>(task / kv_heads)], task % kv_heads,
                  context.sums(thread, a.pages.head_size));
    context.pool.barrier();
}
