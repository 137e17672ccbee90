// 16 fp32 lanes as one AVX-512F register; same bits as isa_generic.h.
#include "fold.h"

struct F16 {
    __m512 v;
};

inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline F16 load_panel(const float* p) { return load(p); }
inline F16 load_panel(const uint16_t* p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i shift = _mm512_setr_epi32(16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i shifted = _mm512_sllv_epi32(_mm512_broadcast_i64x4(pairs), shift);
    return {_mm512_castsi512_ps(_mm512_and_si512(shifted, high))};
}
inline void store(float* p, const F16& x) { _mm512_storeu_ps(p, x.v); }
inline F16 add(const F16& a, const F16& b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(const F16& a, const F16& b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(const F16& a, const F16& b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(const F16& a, const F16& b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 max(const F16& a, const F16& b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(const F16& a, const F16& b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 fma(const F16& a, const F16& b, const F16& c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline F16 keep_below(const F16& x, int n, const F16& fill) {
    const auto mask = static_cast<__mmask16>((1u << n) - 1u);
    return {_mm512_mask_blend_ps(mask, fill.v, x.v)};
}
inline F16 exp2_of_rounded(const F16& z) {
    const __m512i biased = _mm512_add_epi32(_mm512_castps_si512(z.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
inline __m256 low_half(const F16& x) { return _mm512_castps512_ps256(x.v); }
inline __m256 high_half(const F16& x) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1));
}
inline float sum_lanes(const F16& x) { return sum_of(low_half(x), high_half(x)); }
inline float max_lanes(const F16& x) { return max_of(low_half(x), high_half(x)); }
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// 32 registers: 8 to 12 accumulators of 16 lanes.
constexpr int panels_at_once(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
