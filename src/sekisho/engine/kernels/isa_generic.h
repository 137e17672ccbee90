// 16 fp32 lanes in portable C++. Defines the meaning of every operation: the other isa_*.h files
// give the same bits.
struct F16 {
    float lane[16];
};

#define SK_EACH(expression)                            \
    F16 result;                                        \
    for (int i = 0; i < 16; ++i) result.lane[i] = expression; \
    return result

inline F16 set1(float x) { SK_EACH(x); }
inline F16 load(const float* p) { SK_EACH(p[i]); }
inline F16 load(const uint16_t* p) { SK_EACH(from_bits(uint32_t{p[i]} << 16)); }
inline F16 load_panel(const float* p) { return load(p); }
// bf16 panels lie in pairs (column i, column i + 8), see gemm.h.
inline F16 load_panel(const uint16_t* p) {
    SK_EACH(from_bits(uint32_t{p[2 * (i % 8) + i / 8]} << 16));
}
inline void store(float* p, const F16& x) { __builtin_memcpy(p, x.lane, sizeof x.lane); }
inline F16 add(const F16& a, const F16& b) { SK_EACH(a.lane[i] + b.lane[i]); }
inline F16 sub(const F16& a, const F16& b) { SK_EACH(a.lane[i] - b.lane[i]); }
inline F16 mul(const F16& a, const F16& b) { SK_EACH(a.lane[i] * b.lane[i]); }
inline F16 div(const F16& a, const F16& b) { SK_EACH(a.lane[i] / b.lane[i]); }
// As x86 has it: the second operand where either is NaN.
inline F16 max(const F16& a, const F16& b) {
    SK_EACH(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]);
}
inline F16 min(const F16& a, const F16& b) {
    SK_EACH(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]);
}
inline F16 fma(const F16& a, const F16& b, const F16& c) {
    SK_EACH(__builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]));
}
// Lanes below n are x, the others fill: a select, so what x holds there cannot matter.
inline F16 keep_below(const F16& x, int n, const F16& fill) {
    SK_EACH(i < n ? x.lane[i] : fill.lane[i]);
}
// 2**n from z = n + 1.5 * 2**23, n in -126..127.
inline F16 exp2_of_rounded(const F16& z) { SK_EACH(from_bits((to_bits(z.lane[i]) + 127) << 23)); }
// Reductions, by halves.
inline float sum_lanes(const F16& x) {
    float lanes[16];
    store(lanes, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline float max_lanes(const F16& x) {
    float lanes[16];
    store(lanes, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Panels that one tile of `rows` rows works on at once.
constexpr int panels_at_once(int) { return 1; }
#undef SK_EACH
