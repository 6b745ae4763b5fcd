// Classes of keys: how much of the weights is on each of them.
#pragma once
#include <cstdlib>

#include "strip.hpp"

// The keys of each class, listed once for all strips: block by block, and there class by class. So
// what a class is given in a block is summed in a register.
struct Members {
    const Problem &a;
    int64_t blocks;   // of a text
    int64_t *starts;  // [B][block][C]: of lists that end where the next begins
    uint8_t *keys;    // counted from the first of their block

    explicit Members(const Problem &a) : a(a), blocks((a.S + KEYS - 1) / KEYS) {
        int64_t lists = a.B * blocks * a.C, found = 0;
        starts = static_cast<int64_t *>(std::malloc(8 * (lists + 1) + a.B * a.S * a.C));
        if (!starts) return;
        keys = reinterpret_cast<uint8_t *>(starts + lists + 1);
        for (int64_t list = 0; list < lists; list++) {
            int64_t block = list / a.C, first = block % blocks * KEYS;
            const float *shares = of_block(block / blocks, first) + list % a.C;
            starts[list] = found;
            for (int64_t r = 0; r < std::min<int64_t>(KEYS, a.S - first); r++) {
                keys[found] = r;
                found += shares[r * a.C] != 0;
            }
        }
        starts[lists] = found;
    }
    Members(const Members &) = delete;
    ~Members() { std::free(starts); }

    // [key][C]: how much of each class the keys of a block are.
    const float *of_block(int64_t b, int64_t first) const {
        return a.classes + (b * a.S + first) * a.C;
    }
    const int64_t *lists(int64_t b, int64_t first) const {
        return starts + (b * blocks + first / KEYS) * a.C;
    }
};

// Sums over the keys of each class, for the rows of a strip.
struct Classes {
    // Weights; shares of the keys that are seen; of those that have the largest logit; and weights
    // times norms.
    enum Sum { MASS, SEEN, TOP, NORMED };

    const Strip &q;
    const Problem &a;
    const Room &room;

    explicit Classes(const Strip &q) : q(q), a(q.a), room(q.room) {
        std::fill_n(room.classes, 4 * a.C * ROWS, 0.0f);
        std::fill_n(room.common, a.C, 0.0f);
    }

    // Take in which members of a block are seen, where not all are.
    void count(const Block &k) const {
        for (int64_t c = 0; c < a.C; c++)
            add_to(SEEN, c, over(k, c, [](Floats s, float share, int64_t, int) {
                return visible(s) ? all(share) : Floats{};
            }));
    }

    // Take in where the largest logits are; those before do not count where they have risen.
    void find_top(const Block &k, const Floats *top, const Floats *kept) const {
        for (int64_t c = 0; c < a.C; c++)
            add_to(TOP, c, over(k, c, [&](Floats s, float share, int64_t, int v) {
                return s == top[v] ? all(share) : Floats{};
            }), kept);
    }

    // Take in the weights of a block; what came before is scaled by factors.
    template <class Norms> void add(const Block &k, const Floats *factor, Norms norms) const {
        for (int64_t c = 0; c < a.C; c++) {
            float seen = 0;
            add_to(MASS, c, over(k, c, [&](Floats p, float share, int64_t, int v) {
                if (v == 0) seen += share;
                return p * share;
            }), factor);
            if (!k.edge) room.common[c] += seen;
            if (a.class_share)
                add_to(NORMED, c, over(k, c, [&](Floats p, float share, int64_t key, int v) {
                    return p * share * norms(v, key);
                }), factor);
        }
    }

    // Take in a sum over keys that come after these; either is scaled by a factor.
    void merge(Sum sum, const Classes &next, int v, Floats factor, Floats theirs) const {
        for (int64_t c = 0; c < a.C; c++)
            store(at(sum, c, v), of(sum, c, v) * factor + next.of(sum, c, v) * theirs);
    }

    void write(int v, int n, Floats weight, Floats normed, Floats ties) const {
        auto put = [&](float *found, auto column) {
            if (found) write_columns(n, a.C, found + q.row(v * W) * a.C, column);
        };
        put(a.class_mass, [&](int64_t c) { return of(MASS, c, v) * weight; });
        put(a.class_keys, [&](int64_t c) { return of(SEEN, c, v) + room.common[c]; });
        put(a.class_top, [&](int64_t c) { return ties > 0 ? of(TOP, c, v) / ties : Floats{}; });
        put(a.class_share, [&](int64_t c) { return of(NORMED, c, v) / normed; });
    }

  private:
    struct Sums { Floats of[V]; };

    float *at(Sum sum, int64_t c, int v) const {
        return room.classes + (sum * a.C + c) * ROWS + v * W;
    }
    Floats of(Sum sum, int64_t c, int v) const { return load(at(sum, c, v)); }
    void add_to(Sum sum, int64_t c, const Sums &more, const Floats *factor = nullptr) const {
        float *to = at(sum, c, 0);
        UNROLL for (int v = 0; v < V; v++)
            store(to + v * W, load(to + v * W) * (factor ? factor[v] : all(1.0f)) + more.of[v]);
    }

    // Sums over those members of a class that each vector of queries looks at.
    template <class Term> Sums over(const Block &k, int64_t c, Term term) const {
        int64_t before = k.start % KEYS, first = k.start - before;  // where the block was cut
        const int64_t *list = room.members->lists(q.b, first) + c;
        const uint8_t *key = room.members->keys + list[0], *end = room.members->keys + list[1];
        while (key < end && *key < before) key++;
        const float *shares = room.members->of_block(q.b, first) + c;
        const float *s = room.s - before * ROWS;
        Sums sums = {};
        // Keys that all vectors look at, those that the second does, and those that the last does.
        auto stretch = [&]<int skip>() {
            for (; key < end && *key < before + k.rows[skip]; key++)
                UNROLL for (int v = skip; v < V; v++)
                    sums.of[v] += term(load(s + *key * ROWS + v * W), shares[*key * a.C],
                                       first + *key, v);
        };
        stretch.template operator()<0>();
        stretch.template operator()<1>();
        stretch.template operator()<2>();
        return sums;
    }
};
