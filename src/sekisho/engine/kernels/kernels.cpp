// The native forward pass: one copy of the algorithms, compiled for each instruction set, and the
// C functions that binding.py calls. A call returns 0, or -1 where memory or threads ran out.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "context.h"
#include "pool.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pages are little-endian");

namespace {

inline float from_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t to_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

// The angle as transformers has it: an fp32 product; its cosine and sine are rounded once.
void rope_angles(int32_t position, const SkModel& model, float* cosine, float* sine) {
    for (int64_t i = 0; i < model.rotary_dim / 2; ++i) {
        const double angle = static_cast<float>(position) * model.inv_freq[i];
        cosine[i] = static_cast<float>(std::cos(angle)) * model.rope_factor;
        sine[i] = static_cast<float>(std::sin(angle)) * model.rope_factor;
    }
}

// Round to nearest with denormals kept, whatever the thread was set to: part of "the same bits".
class PlainRounding {
public:
#if defined(__x86_64__)
    PlainRounding() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~PlainRounding() { _mm_setcsr(before_); }

private:
    unsigned before_;
#else
    PlainRounding() {}
    ~PlainRounding() {}
#endif
};

namespace generic {
#include "isa_generic.h"
#include "variant.h"
}  // namespace generic

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "isa_avx2.h"
#include "variant.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx2,fma")
namespace avx512 {
#include "isa_avx512.h"
#include "variant.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

enum Variant : int { GENERIC = 0, AVX2 = 1, AVX512 = 2 };

#if defined(__x86_64__)
#define SK_DISPATCH(variant, call)             \
    switch (variant) {                         \
        case AVX512: avx512::call; break;      \
        case AVX2: avx2::call; break;          \
        default: generic::call; break;         \
    }
#else
#define SK_DISPATCH(variant, call) generic::call
#endif

template <class W>
void pack(const W* matrix, int64_t n, int64_t k, int64_t panel, bool pairs, W* out) {
    for (int64_t i = 0; i < k; ++i)
        for (int64_t c = 0; c < 16; ++c) {
            const int64_t column = panel * 16 + c;
            const int64_t place = pairs ? c % 8 * 2 + c / 8 : c;
            out[i * 16 + place] = column < n ? matrix[column * k + i] : W{0};
        }
}

struct Packing {
    Pool& pool;
    const void* matrix;
    int64_t n, k, stride;
    bool bf16;
    void* out;
};

void pack_all(void* self, int) {
    const Packing& p = *static_cast<Packing*>(self);
    for (int64_t panel; (panel = p.pool.take()) < (p.n + 15) / 16;) {
        const int64_t at = panel * p.stride * p.k * 16;
        if (p.bf16)
            pack(static_cast<const uint16_t*>(p.matrix), p.n, p.k, panel, true,
                 static_cast<uint16_t*>(p.out) + at);
        else
            pack(static_cast<const float*>(p.matrix), p.n, p.k, panel, false,
                 static_cast<float*>(p.out) + at);
    }
}

template <class Call>
int guarded(Call call) {
    try {
        call();
        return 0;
    } catch (...) {
        return -1;
    }
}

}  // namespace

#define SK_EXPORT extern "C" __attribute__((visibility("default")))

SK_EXPORT int sk_supported(int variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (variant == AVX512) return avx2 && __builtin_cpu_supports("avx512f");
    if (variant == AVX2) return avx2;
#endif
    return variant == GENERIC;
}

SK_EXPORT void* sk_create(int threads) {
    void* context = nullptr;
    guarded([&] { context = new Context(threads); });
    return context;
}

SK_EXPORT void sk_destroy(void* context) { delete static_cast<Context*>(context); }

// matrix [n, k] into panels of [k][16], `stride` panels apart.
SK_EXPORT int sk_pack(void* context, const void* matrix, int64_t n, int64_t k, int bf16,
                      int64_t stride, void* out) {
    Context& c = *static_cast<Context*>(context);
    Packing packing{c.pool, matrix, n, k, stride, bf16 != 0, out};
    return guarded([&] { c.pool.run(pack_all, &packing); });
}

SK_EXPORT int sk_gemm(int variant, void* context, const float* x, int64_t rows, const void* panels,
                      int64_t n, int64_t k, int bf16, float* out) {
    Context& c = *static_cast<Context*>(context);
    return guarded(
        [&] { SK_DISPATCH(variant, gemm(c, x, rows, panels, n, k, bf16 != 0, out)); });
}

// q and out [rows, heads * head_size]; reads the pages only.
SK_EXPORT int sk_attention(int variant, void* context, const SkPages* pages, const SkBatch* batch,
                           int64_t layer, const float* q, float* out) {
    Context& c = *static_cast<Context*>(context);
    return guarded([&] { SK_DISPATCH(variant, attention(c, *pages, *batch, layer, q, out)); });
}

SK_EXPORT int sk_forward(int variant, void* context, const SkModel* model, const SkBatch* batch,
                         float* logits) {
    Context& c = *static_cast<Context*>(context);
    return guarded([&] { SK_DISPATCH(variant, forward(c, *model, *batch, logits)); });
}
