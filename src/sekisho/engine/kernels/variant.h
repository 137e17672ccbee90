// Included once for each instruction set, inside its namespace: the algorithms and their doors.

#include "numeric.h"
#include "gemm.h"
#include "attention.h"
#include "forward.h"

template <class W>
void forward_of(Context& context, const SkModel& model, const SkBatch& batch, float* logits) {
    const Forward<W> forward(context, model, batch, logits);
    context.pool.run(
        [](void* self, int thread) {
            const PlainRounding plain;
            static_cast<const Forward<W>*>(self)->run(thread);
        },
        const_cast<Forward<W>*>(&forward));
}

template <class W>
void attention_of(Context& context, Attention a, const SkBatch& batch) {
    struct Work {
        Context& context;
        Attention& a;
        const SkBatch& batch;
    } work{context, a, batch};
    context.sums_start = context.memory(context.pool.size() * QUERIES_MAX * a.pages.head_size);
    context.plan(batch, a.pages);
    context.pool.run(
        [](void* self, int thread) {
            const PlainRounding plain;
            const Work& w = *static_cast<Work*>(self);
            attention<W>(w.context, w.a, w.batch, thread);
        },
        &work);
}

template <class W>
void gemm_of(Context& context, Gemm g) {
    struct Work {
        Context& context;
        Gemm& g;
    } work{context, g};
    context.pool.run(
        [](void* self, int) {
            const PlainRounding plain;
            const Work& w = *static_cast<Work*>(self);
            gemm<W>(w.context.pool, w.g);
        },
        &work);
}

inline void forward(Context& context, const SkModel& model, const SkBatch& batch, float* logits) {
    model.pages.bf16 ? forward_of<uint16_t>(context, model, batch, logits)
                     : forward_of<float>(context, model, batch, logits);
}

inline void attention(Context& context, const SkPages& pages, const SkBatch& batch, int64_t layer,
                      const float* q, float* out) {
    const Attention a{pages, layer, q, pages.heads * pages.head_size, out};
    pages.bf16 ? attention_of<uint16_t>(context, a, batch) : attention_of<float>(context, a, batch);
}

inline void gemm(Context& context, const float* x, int64_t rows, const void* panels, int64_t n,
                 int64_t k, bool bf16, float* out) {
    const Gemm g{x, k, rows, panels, k, n, nullptr, false, out, n};
    bf16 ? gemm_of<uint16_t>(context, g) : gemm_of<float>(context, g);
}
