// The whole forward pass; every thread of the pool runs it and meets the others after each op.

template <class W>
class Forward {
public:
    Forward(Context& context, const SkModel& model, const SkBatch& batch, float* logits)
        : context_(context), pool_(context.pool), m_(model), b_(batch), logits_(logits) {
        const SkPages& p = model.pages;
        q_columns_ = p.heads * p.head_size;
        qkv_columns_ = q_columns_ + 2 * p.kv_heads * p.head_size;
        padded_ = (model.intermediate + 15) / 16 * 16;
        half_rotary_ = model.rotary_dim / 2;
        float** const parts[] = {&hidden_, &normed_, &branch_,  &qkv_,
                                 &mixed_,  &wide_,   &gated_, &rope_, &context.sums_start};
        const int64_t sizes[] = {batch.rows * model.hidden, batch.rows * model.hidden,
                                 batch.rows * model.hidden, batch.rows * qkv_columns_,
                                 batch.rows * q_columns_,   batch.rows * 2 * padded_,
                                 batch.rows * padded_,      batch.rows * 2 * half_rotary_,
                                 context.pool.size() * QUERIES_MAX * p.head_size};
        int64_t total = 0;
        for (const int64_t size : sizes) total += (size + 15) / 16 * 16;
        float* next = context.memory(total);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            *parts[i] = next;
            next += (sizes[i] + 15) / 16 * 16;
        }
        context.plan(batch, p);
    }

    void run(int thread) const {
        int64_t rows = b_.rows;
        each_row(rows, [&](int64_t row) { embed(row); });
        for (int64_t layer = 0; layer < m_.layers; ++layer) {
            const SkLayer& w = m_.layer[layer];
            each_row(rows, [&](int64_t row) { norm(row, w.input_norm); });
            gemm<W>(pool_, {normed_, m_.hidden, rows, w.qkv, m_.hidden, qkv_columns_, w.qkv_bias,
                            false, qkv_, qkv_columns_});
            for_sequences([&](int64_t row, const int32_t* table) { place(row, table, layer, w); });
            if (layer + 1 == m_.layers && b_.outputs < rows) rows = b_.outputs;
            if (rows == 0) return;
            attention<W>(context_, {m_.pages, layer, qkv_, qkv_columns_, mixed_}, b_, thread);
            if (rows < b_.rows) keep_logit_rows();
            project(rows, mixed_, q_columns_, w.o, q_columns_, w.attention_out_norm);
            each_row(rows, [&](int64_t row) { norm(row, w.mlp_norm); });
            const Gemm gate_up{normed_, m_.hidden, rows,  w.gate_up, m_.hidden, 2 * padded_,
                               nullptr, false,     wide_, 2 * padded_};
            gemm<W>(pool_, gate_up, [&](int64_t row, int64_t row_end, int64_t panel, int64_t end) {
                gate(row, row_end, panel, end);
            });
            project(rows, gated_, padded_, w.down, m_.intermediate, w.mlp_out_norm);
        }
        each_row(rows, [&](int64_t row) { norm(row, m_.final_norm); });
        gemm<W>(pool_, {normed_, m_.hidden, rows, m_.lm_head, m_.hidden, m_.vocab, nullptr, false,
                        logits_, m_.vocab});
    }

private:
    template <class Function>
    void each_row(int64_t rows, Function function) const {
        const int64_t share = rows / (pool_.size() * 4);
        const int64_t chunk = share < 1 ? 1 : share > 16 ? 16 : share;
        for (int64_t row; (row = pool_.take() * chunk) < rows;)
            for (int64_t i = row; i < row + chunk && i < rows; ++i) function(i);
        pool_.barrier();
    }

    // By the blocks of attention: the rows of one page mostly fall to one thread.
    template <class Function>
    void for_sequences(Function function) const {
        const auto& blocks = context_.row_blocks;
        for (int64_t i; (i = pool_.take()) < static_cast<int64_t>(blocks.size());) {
            const RowBlock& block = blocks[static_cast<size_t>(i)];
            for (int64_t row = block.begin; row < block.end; ++row)
                function(row, b_.tables + block.sequence * b_.pages_max);
        }
        pool_.barrier();
    }

    void embed(int64_t row) const {
        const W* from = static_cast<const W*>(m_.embedding) + b_.tokens[row] * m_.hidden;
        float* to = hidden_ + row * m_.hidden;
        for (int64_t i = 0; i < m_.hidden; ++i) to[i] = widen_one(from[i]);
        float* const cosine = rope_ + row * 2 * half_rotary_;
        rope_angles(b_.positions[row], m_, cosine, cosine + half_rotary_);
    }

    void norm(int64_t row, const float* weight) const {
        rms_norm(hidden_ + row * m_.hidden, weight, m_.hidden, m_.eps, normed_ + row * m_.hidden);
    }

    void rotate(float* x, int64_t row) const {
        const float* const cosine = rope_ + row * 2 * half_rotary_;
        const float* const sine = cosine + half_rotary_;
        const int64_t step = m_.rope_interleaved ? 2 : 1;
        const int64_t apart = m_.rope_interleaved ? 1 : half_rotary_;
        for (int64_t i = 0; i < half_rotary_; ++i) {
            const float a = x[i * step], b = x[i * step + apart];
            x[i * step] = a * cosine[i] - b * sine[i];
            x[i * step + apart] = b * cosine[i] + a * sine[i];
        }
    }

    // Norms and rotates Q and K of a row and writes K and V into its page.
    void place(int64_t row, const int32_t* table, int64_t layer, const SkLayer& w) const {
        const SkPages& p = m_.pages;
        float* const q = qkv_ + row * qkv_columns_;
        for (int64_t head = 0; head < p.heads + p.kv_heads; ++head) {
            float* const x = q + head * p.head_size;
            const float* const weight = head < p.heads ? w.q_norm : w.k_norm;
            if (weight != nullptr) rms_norm(x, weight, p.head_size, m_.eps, x);
            rotate(x, row);
        }
        const int64_t position = b_.positions[row], slot = position % p.page_size;
        const int64_t columns = p.kv_heads * p.head_size;
        uint8_t* const page = p.region + table[position / p.page_size] * p.page_bytes;
        W* const k = reinterpret_cast<W*>(page + HEADER_BYTES) + 2 * layer * columns * p.page_size;
        W* const v = k + columns * p.page_size;
        for (int64_t i = 0; i < columns; ++i)
            narrow_one(q[q_columns_ + i], k + i * p.page_size + slot);
        for (int64_t head = 0; head < p.kv_heads; ++head) {
            const float* const from = q + q_columns_ + columns + head * p.head_size;
            W* const to = v + (head * p.page_size + slot) * p.head_size;
            for (int64_t i = 0; i < p.head_size; ++i) narrow_one(from[i], to + i);
        }
    }

    // After the last attention only the rows whose logits are wanted go on, moved to the front.
    void keep_logit_rows() const {
        if (pool_.take() == 0)
            for (int64_t i = 0; i < b_.outputs; ++i) {
                const int64_t row = b_.logit_rows[i];
                if (row == i) continue;
                __builtin_memcpy(hidden_ + i * m_.hidden, hidden_ + row * m_.hidden,
                                 static_cast<size_t>(m_.hidden) * sizeof(float));
                __builtin_memcpy(mixed_ + i * q_columns_, mixed_ + row * q_columns_,
                                 static_cast<size_t>(q_columns_) * sizeof(float));
            }
        pool_.barrier();
    }

    // hidden += x · weights^T, or its norm where the model has one after the branch.
    void project(int64_t rows, const float* x, int64_t stride, const void* weights, int64_t k,
                 const float* out_norm) const {
        const bool direct = out_norm == nullptr;
        gemm<W>(pool_, {x, stride, rows, weights, k, m_.hidden, nullptr, direct,
                        direct ? hidden_ : branch_, m_.hidden});
        if (direct) return;
        each_row(rows, [&](int64_t row) {
            float* const from = branch_ + row * m_.hidden;
            float* const to = hidden_ + row * m_.hidden;
            rms_norm(from, out_norm, m_.hidden, m_.eps, from);
            for (int64_t i = 0; i < m_.hidden; ++i) to[i] += from[i];
        });
    }

    void gate(int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) const {
        for (; row < row_end; ++row)
            for (int64_t p = panel; p < panel_end; p += 2) {
                const float* const from = wide_ + row * 2 * padded_ + p * 16;
                silu_mul(from, from + 16, gated_ + row * padded_ + p * 8);
            }
    }

    Context& context_;
    Pool& pool_;
    const SkModel& m_;
    const SkBatch& b_;
    float* const logits_;
    int64_t q_columns_, qkv_columns_, padded_, half_rotary_;
    float *hidden_, *normed_, *branch_, *qkv_, *mixed_, *wide_, *gated_, *rope_;
};
