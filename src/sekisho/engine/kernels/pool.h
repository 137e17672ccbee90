// A few threads that run one function together, with a barrier and a shared task counter.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Waiting spins this long, then sleeps: ops of one forward follow each other within microseconds,
// yet a process that shares its cores must not burn them.
constexpr std::chrono::microseconds SPIN{30};

class Pool {
public:
    explicit Pool(int threads) : size_(threads) {
        for (int id = 1; id < threads; ++id) workers_.emplace_back([this, id] { work(id); });
    }

    ~Pool() {
        run(nullptr, nullptr);
        for (auto& worker : workers_) worker.join();
    }

    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Every thread runs body(arg, id), the caller as id 0; returns when all have. A null body ends
    // the workers.
    void run(void (*body)(void*, int), void* arg) {
        body_ = body;
        arg_ = arg;
        next_.store(0, std::memory_order_relaxed);
        epoch_.fetch_add(1);
        wake();
        if (body != nullptr) body(arg, 0);
        barrier();
    }

    // Index of the next task of the current op; the barrier sets it back to 0.
    int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    void barrier() {
        const uint64_t generation = generation_.load();
        if (arrived_.fetch_add(1) + 1 == size_) {
            arrived_.store(0);
            next_.store(0);
            generation_.fetch_add(1);
            wake();
        } else {
            wait([&] { return generation_.load() != generation; });
        }
    }

private:
    void work(int id) {
        for (uint64_t seen = 1;; ++seen) {
            wait([&] { return epoch_.load() >= seen; });
            auto* const body = body_;
            if (body != nullptr) body(arg_, id);
            barrier();
            if (body == nullptr) return;
        }
    }

    template <class Done>
    void wait(Done done) {
        const auto give_up = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int i = 0; i < 64; ++i) {
                if (done()) return;
#if defined(__x86_64__)
                _mm_pause();
#endif
            }
        } while (std::chrono::steady_clock::now() < give_up);
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);  // before done() is asked again, so that wake() cannot miss us
        condition_.wait(lock, done);
        sleepers_.fetch_sub(1);
    }

    void wake() {
        if (sleepers_.load() == 0) return;
        { std::lock_guard<std::mutex> lock(mutex_); }
        condition_.notify_all();
    }

    const int size_;
    void (*body_)(void*, int) = nullptr;
    void* arg_ = nullptr;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint64_t> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint64_t> generation_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable condition_;
    std::vector<std::thread> workers_;
};
