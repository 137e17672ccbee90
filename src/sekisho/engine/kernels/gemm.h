// out[m, n] = x[m, k] · W[n, k]^T with W packed in panels of 16 output columns: panel p holds
// [k][16], padded with zero columns; a bf16 panel row lies as pairs (column i, column i + 8), so
// that one shift and one mask widen it.
//
// Every output is one chain of fused multiply-adds over k ascending, whatever the tile, so a row's
// bits depend on that row alone.

struct Gemm {
    const float* x;
    int64_t x_stride;
    int64_t rows;
    const void* panels;
    int64_t k;
    int64_t n;  // columns stored; the last panel may have fewer than 16
    const float* bias;  // padded to 16, or null
    bool accumulate;    // add to what out holds (the residual)
    float* out;
    int64_t out_stride;

    int64_t panel_count() const { return (n + 15) / 16; }
};

inline void store_tile(const Gemm& g, int64_t row, int64_t panel, F16 value) {
    const int64_t column = panel * 16;
    float* out = g.out + row * g.out_stride + column;
    if (g.bias != nullptr) value = add(value, load(g.bias + column));
    if (column + 16 <= g.n) {
        store(out, g.accumulate ? add(load(out), value) : value);
        return;
    }
    float lanes[16];
    store(lanes, value);
    for (int64_t i = 0; i < g.n - column; ++i) out[i] = g.accumulate ? out[i] + lanes[i] : lanes[i];
}

template <int ROWS, int PANELS, bool FETCH, class W>
inline void tile(const Gemm& g, int64_t row, int64_t panel) {
    const W* w = static_cast<const W*>(g.panels) + panel * g.k * 16;
    const float* x = g.x + row * g.x_stride;
    const int64_t k = g.k, panel_size = g.k * 16, x_stride = g.x_stride;
    F16 sum[ROWS][PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p) sum[r][p] = set1(0.0f);
    for (int64_t i = 0; i < k; ++i, w += 16) {
        F16 column[PANELS];
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p) {
            column[p] = load_panel(w + p * panel_size);
            if (FETCH) prefetch(w + (PANELS + p) * panel_size);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const F16 value = set1(x[r * x_stride + i]);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p) sum[r][p] = fma(value, column[p], sum[r][p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p) store_tile(g, row + r, panel + p, sum[r][p]);
}

template <int ROWS, int PANELS, class W>
inline void tile_panels(const Gemm& g, int64_t row, int64_t panel, int64_t end, bool fetch) {
    for (; panel + PANELS <= end; panel += PANELS) {
        if (fetch)
            tile<ROWS, PANELS, true, W>(g, row, panel);
        else
            tile<ROWS, PANELS, false, W>(g, row, panel);
    }
    if constexpr (PANELS > 1) tile_panels<ROWS, PANELS / 2, W>(g, row, panel, end, fetch);
}

template <int ROWS, class W>
inline void tile_rows(const Gemm& g, int64_t row, int64_t panel, int64_t end, bool fetch) {
    tile_panels<ROWS, panels_at_once(ROWS), W>(g, row, panel, end, fetch);
}

constexpr int64_t TILE_ROWS = 6;
constexpr int64_t BLOCK_ROWS = 96;  // rows that stay in the second-level cache

template <class W>
void gemm_block(const Gemm& g, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    const int64_t tiles = (row_end - row + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t small = (row_end - row) / tiles, larger = (row_end - row) % tiles;
    const int64_t step = panels_at_once(static_cast<int>(small + (larger > 0)));
    for (; panel < panel_end; panel += step) {
        const int64_t end = panel + step < panel_end ? panel + step : panel_end;
        int64_t first = row;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t count = small + (t < larger);
            const bool fetch = tiles > 1 && t == 0;
            switch (count) {
                case 1: tile_rows<1, W>(g, first, panel, end, fetch); break;
                case 2: tile_rows<2, W>(g, first, panel, end, fetch); break;
                case 3: tile_rows<3, W>(g, first, panel, end, fetch); break;
                case 4: tile_rows<4, W>(g, first, panel, end, fetch); break;
                case 5: tile_rows<5, W>(g, first, panel, end, fetch); break;
                default: tile_rows<6, W>(g, first, panel, end, fetch); break;
            }
            first += count;
        }
    }
}

// Cuts `panels` into tasks of whole pairs, large ones first, so that the threads end together.
struct PanelTasks {
    int64_t panels, threads;

    int64_t after(int64_t begin) const {
        const int64_t left = panels - begin;
        const int64_t size = left / (4 * threads) / 2 * 2;
        return begin + (size > 2 ? size : left < 2 ? left : 2);
    }
    int64_t count() const {
        int64_t tasks = 0;
        for (int64_t begin = 0; begin < panels; begin = after(begin)) ++tasks;
        return tasks;
    }
    int64_t begin(int64_t task) const {
        int64_t at = 0;
        while (task-- > 0) at = after(at);
        return at;
    }
};

// Called by every thread of the pool; `done(row, row_end, panel, panel_end)` runs on each finished
// block while it is warm, with panels in pairs. Ends with a barrier.
template <class W, class Done>
void gemm(Pool& pool, const Gemm& g, Done done) {
    const PanelTasks tasks{g.panel_count(), pool.size()};
    const int64_t blocks = (g.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t count = tasks.count() * blocks;
    for (int64_t task; (task = pool.take()) < count;) {
        const int64_t row = task % blocks * BLOCK_ROWS, panel = tasks.begin(task / blocks);
        const int64_t row_end = row + BLOCK_ROWS < g.rows ? row + BLOCK_ROWS : g.rows;
        const int64_t panel_end = tasks.after(panel);
        gemm_block<W>(g, row, row_end, panel, panel_end);
        done(row, row_end, panel, panel_end);
    }
    pool.barrier();
}

template <class W>
void gemm(Pool& pool, const Gemm& g) {
    gemm<W>(pool, g, [](int64_t, int64_t, int64_t, int64_t) {});
}
