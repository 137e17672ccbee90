// Element-wise and row-wise functions on F16, one fixed order of operations each.

// exp(x): x = n ln2 + r, polynomial in r of degree 7 and 2**n in the exponent field. Coefficients
// and the two-part ln2 are those of Cephes expf (S. Moshier); relative error below 2e-7. The
// argument is clamped to where the result is a normal number; NaN stays NaN; exp(0) is exactly 1.
inline F16 exp(F16 x) {
    const F16 round = set1(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
    x = max(set1(-87.3365447505531f), x);
    x = min(set1(88.3762626647949f), x);
    const F16 z = fma(x, set1(1.44269504088896341f), round);
    const F16 n = sub(z, round);
    F16 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    return mul(p, exp2_of_rounded(z));
}

inline float exp(float x) {
    float lanes[16];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// out = x / sqrt(mean(x**2) + eps) * weight; out may be x.
inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    F16 squares = set1(0.0f);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const F16 part = load(x + i);
        squares = fma(part, part, squares);
    }
    if (i < n) {
        float rest[16] = {};
        for (int64_t j = i; j < n; ++j) rest[j - i] = x[j];
        squares = fma(load(rest), load(rest), squares);
    }
    const float mean = sum_lanes(squares) / static_cast<float>(n);
    const float scale = 1.0f / __builtin_sqrtf(mean + eps);
    for (int64_t j = 0; j < n; ++j) out[j] = x[j] * scale * weight[j];
}

// out = gate * sigmoid(gate) * up, 16 lanes.
inline void silu_mul(const float* gate, const float* up, float* out) {
    const F16 g = load(gate);
    const F16 denominator = add(set1(1.0f), exp(sub(set1(0.0f), g)));
    store(out, mul(div(g, denominator), load(up)));
}

inline float widen_one(float x) { return x; }
inline float widen_one(uint16_t x) { return from_bits(uint32_t{x} << 16); }

inline void narrow_one(float x, float* out) { *out = x; }
// Round to nearest even; a NaN stays a (quiet) NaN.
inline void narrow_one(float x, uint16_t* out) {
    const uint32_t bits = to_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    *out = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}
