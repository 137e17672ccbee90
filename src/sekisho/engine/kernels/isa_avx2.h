// 16 fp32 lanes as two AVX registers; same bits as isa_generic.h.
#include "fold.h"

struct F16 {
    __m256 lo, hi;
};

inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline F16 load(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
inline F16 load_panel(const float* p) { return load(p); }
inline F16 load_panel(const uint16_t* p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, high))};
}
inline void store(float* p, const F16& x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
inline F16 add(const F16& a, const F16& b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F16 sub(const F16& a, const F16& b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F16 mul(const F16& a, const F16& b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline F16 div(const F16& a, const F16& b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline F16 max(const F16& a, const F16& b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline F16 min(const F16& a, const F16& b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline F16 fma(const F16& a, const F16& b, const F16& c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 keep_below(const F16& x, int n, const F16& fill) {
    const __m256i count = _mm256_set1_epi32(n);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i lo = _mm256_cmpgt_epi32(count, lane);
    const __m256i hi = _mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8)));
    return {_mm256_blendv_ps(fill.lo, x.lo, _mm256_castsi256_ps(lo)),
            _mm256_blendv_ps(fill.hi, x.hi, _mm256_castsi256_ps(hi))};
}
inline __m256 exp2_of_rounded(__m256 z) {
    const __m256i biased = _mm256_add_epi32(_mm256_castps_si256(z), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline F16 exp2_of_rounded(const F16& z) {
    return {exp2_of_rounded(z.lo), exp2_of_rounded(z.hi)};
}
inline float sum_lanes(const F16& x) { return sum_of(x.lo, x.hi); }
inline float max_lanes(const F16& x) { return max_of(x.lo, x.hi); }
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// 16 registers: up to 12 accumulators, at least 8 where FMA latency would show.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
