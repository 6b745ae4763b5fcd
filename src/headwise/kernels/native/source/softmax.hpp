// The running softmax of a strip, and all that is said about its weights.
//
// Exponentials are taken relative to the largest logit so far. When a larger one comes, what was summed
// is scaled down; so one pass over the keys is enough for everything that is a sum over weights.
#pragma once
#include <cmath>

#include "strip.hpp"

constexpr float NONE = HIDDEN / 2;  // what is below is hidden

struct Softmax {
    const Strip &q;
    const Problem &a;
    const Room &room;
    Floats peak[V], total[V] = {}, moment[V] = {};  // sums of p and of p * ln(p / largest p)
    Floats total_lost[V] = {}, moment_lost[V] = {};  // what rounding has added to them
    Floats factor[V];                               // for what was summed before this block
    bool moved = false;                             // whether that is not 1 everywhere
    Floats unbiased[V];                             // the largest logit without bias
    Floats squares[V] = {}, distance[V] = {}, even[V] = {}, normed[V] = {};
    Floats query_at[V] = {};
    Ints n_keys[V] = {}, ties[V] = {}, largest[V] = {};

    explicit Softmax(const Strip &q) : q(q), a(q.a), room(q.room) {
        for (int v = 0; v < V; v++) peak[v] = unbiased[v] = all(HIDDEN);
        std::fill_n(room.picked, a.N * ROWS, HIDDEN);
        std::fill_n(room.classes, 4 * a.C * ROWS, 0.0f);
        std::fill_n(room.common, a.C, 0.0f);
        for (int i = 0; i < q.vectors * W; i++) {
            bool real = i < q.n;
            int64_t row = q.b * a.T + q.query(i);
            for (int64_t c = 0; c < a.N; c++)
                room.key_at[c * ROWS + i] = real ? a.keys[row * a.N + c] : -1;
            if (a.query_at) query_at[i / W][i % W] = real ? a.query_at[row] : 0;
        }
    }

    // Take in the logits of a block before the bias: who is seen, and the largest.
    void look(const Block &k) {
        for (int v = 0; v < q.vectors; v++) {
            if (!k.edge) n_keys[v] += k.rows[v];
            else each(k, v, [&](Floats s, int) { n_keys[v] -= visible(s); });
            if (a.bias || a.by_distance)
                each(k, v, [&](Floats s, int) { unbiased[v] = larger(unbiased[v], s); });
            if (a.even_distance && k.edge)
                each(k, v, [&](Floats s, int r) {
                    even[v] += visible(s) ? away(k, v, r) : Floats{};
                });
        }
        if (a.class_keys) count_members(k);
    }

    // Take in the logits of a block; what remains of them is their exponentials.
    template <class Number = float> void add(const Block &k) {
        moved = false;
        for (int v = 0; v < q.vectors; v++) raise(k, v);
        if (moved) scale_classes();
        if (a.N) pick(k);
        for (int v = 0; v < q.vectors; v++) {
            if (a.entropy) exponentials<true, Number>(k, v);
            else exponentials<false, Number>(k, v);
            if (a.participation)
                each(k, v, [&](Floats p, int) { squares[v] += p * p; });
            if (a.key_norms)
                each(k, v, [&](Floats p, int r) { normed[v] += p * norms(v, k.start + r); });
            if (a.distance) measure_distance(k, v);
        }
        if (a.C) add_classes(k);
    }

    // Take in what the keys that come after these have given to the same rows.
    void merge(Softmax &next) {
        for (int v = 0; v < q.vectors; v++) {
            Floats before = peak[v], after = next.peak[v], top = larger(before, after);
            merge_largest(next, v, after > before, after >= before);
            rise(v, top);
            next.rise(v, top);
            add_exactly(total[v], total_lost[v], next.total[v]);
            add_exactly(moment[v], moment_lost[v], next.moment[v]);
            squares[v] += next.squares[v];
            distance[v] += next.distance[v];
            even[v] += next.even[v];
            normed[v] += next.normed[v];
            n_keys[v] += next.n_keys[v];
            unbiased[v] = larger(unbiased[v], next.unbiased[v]);
            for (int64_t c = 0; c < a.N; c++) {
                float *mine = room.picked + c * ROWS + v * W;
                Floats theirs = load(next.room.picked + c * ROWS + v * W);
                store(mine, visible(theirs) ? theirs : load(mine));
            }
        }
        scale_classes();
        next.scale_classes();
        for (int64_t c = 0; c < a.C; c++) {
            room.common[c] += next.room.common[c];
            for (int v = 0; v < q.vectors; v++)
                for (Measure m : {MASS, SHARE, SEEN})
                    add_to(of_class(m, c, v), load(next.of_class(m, c, v)));
        }
    }

    // Write down everything that was asked for; `write_heads` is told how their sums are weighted.
    template <class Heads> void finish(Heads write_heads) const {
        for (int v = 0; v < q.vectors; v++) {
            int n = std::min(W, q.n - v * W);
            End end = last_of(v);
            if (a.heads) write_heads(v, n, end.weight);
            write_rows(v, n, end);
            if (a.N) write_keys(v, n, end);
            if (a.C) write_classes(v, n, end);
        }
    }

  private:
    // A row at its end: sums of exponentials relative to its peak, with the part of a sink.
    struct End {
        Floats peak, kept, moment, total, weight;  // weight: of a key that has the largest logit
        Ints none;                                 // rows that see no key
    };

    static Ints visible(Floats s) { return ~(s <= NONE); }

    float norm(int lane, int64_t key) const {
        return a.key_norms[(q.b * a.H + q.head[lane]) * a.S + key];
    }
    Floats norms(int v, int64_t key) const {
        if (q.one_head) return all(norm(0, key));
        Floats found = {};
        for (int i = 0; i < W && v * W + i < q.n; i++) found[i] = norm(v * W + i, key);
        return found;
    }

    template <class Take> void each(const Block &k, int v, Take f) const {
        const float *s = room.s + v * W;
        int r = 0;
        for (; r + 4 <= k.rows[v]; r += 4) UNROLL for (int i = 0; i < 4; i++) f(load(s + (r + i) * ROWS), r + i);
        for (; r < k.rows[v]; r++) f(load(s + r * ROWS), r);
    }

    Floats away(const Block &k, int v, int r) const {
        return absolute(query_at[v] - a.key_at[q.b * a.S + k.start + r]);
    }

    void raise(const Block &k, int v) {
        Floats highest = largest_logit(k, v), top = larger(peak[v], highest);
        if ((a.argmax || a.key_top || a.class_top) && any(highest >= peak[v]))
            find_largest(k, v, top);
        rise(v, top);
    }

    // What was summed relative to the largest logit so far is now relative to a larger one.
    void rise(int v, Floats top) {
        // Rows that have seen nothing yet have sums of 0, which any factor leaves.
        Floats down = peak[v] - top;
        peak[v] = top;
        factor[v] = exponential(down);
        moved |= any(down < 0);
        moment[v] = factor[v] * (moment[v] + down * total[v]);
        total[v] *= factor[v];
        total_lost[v] *= factor[v];
        moment_lost[v] *= factor[v];
        distance[v] *= factor[v];
        normed[v] *= factor[v];
        squares[v] *= factor[v] * factor[v];
    }

    // In four parts: one would wait for itself.
    Floats largest_logit(const Block &k, int v) const {
        Floats part[4] = {all(HIDDEN), all(HIDDEN), all(HIDDEN), all(HIDDEN)};
        each(k, v, [&](Floats s, int r) { part[r % 4] = larger(part[r % 4], s); });
        return larger(larger(part[0], part[1]), larger(part[2], part[3]));
    }

    void find_largest(const Block &k, int v, Floats top) {
        Ints risen = top > peak[v];
        ties[v] = risen ? Ints{} : ties[v];
        largest[v] = risen ? all_ints(-1) : largest[v];
        each(k, v, [&](Floats s, int r) {
            Ints same = s == top;
            ties[v] -= same;
            largest[v] = (same & (largest[v] < 0)) ? all_ints(k.start + r) : largest[v];
        });
        if (!a.class_top) return;
        for (int64_t c = 0; c < a.C; c++) {
            float *sum = of_class(TOP, c, v);
            store(sum, risen ? Floats{} : load(sum));
        }
        each_member(k, [&](int r, int from, int64_t c, float share) {
            if (from > v) return;
            Ints same = load(room.s + r * ROWS + v * W) == top;
            add_to(of_class(TOP, c, v), same ? all(share) : Floats{});
        });
    }

    // Where the largest logits are: those of `next` count where they are larger, or as large.
    void merge_largest(const Softmax &next, int v, Ints risen, Ints same) {
        Ints more = same ? next.ties[v] : Ints{};
        ties[v] = (risen ? Ints{} : ties[v]) + more;
        largest[v] = risen ? next.largest[v] : largest[v];
        for (int64_t c = 0; c < a.C && a.class_top; c++) {
            float *sum = of_class(TOP, c, v);
            Floats theirs = load(next.of_class(TOP, c, v));
            store(sum, (risen ? Floats{} : load(sum)) + (same ? theirs : Floats{}));
        }
    }

    template <bool moments, class Number> void exponentials(const Block &k, int v) {
        // The sums of a block are added up apart, and what adding them rounds is kept (Kahan 1965),
        // so that many small terms are not lost.
        Floats top = peak[v] < NONE ? Floats{} : peak[v], sum = {}, bent = {};
        float *s = room.s + v * W;
        auto take = [&](int r) {
            Floats x = load(s + r * ROWS) - top;
            Floats p = exponential(x);
            sum += p;
            if (moments) bent += p * x;
            store(s + r * ROWS, p);
            return p;
        };
        if constexpr (std::is_same_v<Number, Pair>) {
            float *pairs = room.pairs + v * W;
            int r = 0;
            for (; r + 2 <= k.rows[v]; r += 2) store(pairs + r / 2 * ROWS, paired(take(r), take(r + 1)));
            if (r < k.rows[v]) store(pairs + r / 2 * ROWS, paired(take(r), Floats{}));
        } else {
            for (int r = 0; r < k.rows[v]; r++) take(r);
        }
        add_exactly(total[v], total_lost[v], sum);
        if (moments) add_exactly(moment[v], moment_lost[v], bent);
    }

    static void add_exactly(Floats &sum, Floats &lost, Floats more) {
        Floats due = more - lost, next = sum + due;
        lost = (next - sum) - due;
        sum = next;
    }

    void measure_distance(const Block &k, int v) {
        Floats some = {}, steps = {};
        each(k, v, [&](Floats p, int r) {
            Floats d = away(k, v, r);
            some += p * d;
            steps += d;
        });
        distance[v] += some;
        if (!k.edge) even[v] += steps;
    }

    void pick(const Block &k) {
        for (int64_t c = 0; c < a.N; c++) {
            for (int v = 0; v < q.vectors; v++) {
                const int32_t *keys = room.key_at + c * ROWS + v * W;
                Ints at = load(keys) - int32_t(k.start);
                if (!any((at >= 0) & (at < k.rows[v]))) continue;
                for (int i = 0; i < W; i++) {
                    int64_t r = keys[i] - k.start;
                    if (r < 0 || r >= k.rows[v]) continue;
                    room.picked[c * ROWS + v * W + i] = room.s[r * ROWS + v * W + i];
                }
            }
        }
    }

    enum Measure { MASS, TOP, SHARE, SEEN };

    float *of_class(Measure m, int64_t c, int v) const {
        return room.classes + (m * a.C + c) * ROWS + v * W;
    }
    static void add_to(float *sum, Floats x) { store(sum, load(sum) + x); }

    // Visits each key of a class, with the first vector of queries that looks at it.
    template <class Visit> void each_member(const Block &k, Visit f) const {
        const int64_t *entry = a.class_start + q.b * a.S + k.start;
        for (int r = 0, v = 0; r < k.n; r++) {
            while (v < q.vectors && k.rows[v] <= r) v++;
            for (int64_t e = entry[r]; e < entry[r + 1]; e++)
                f(r, v, a.class_of[e], a.class_share_of[e]);
        }
    }

    void count_members(const Block &k) const {
        if (!k.edge) return each_member(k, [&](int, int, int64_t c, float share) {
            room.common[c] += share;
        });
        each_member(k, [&](int r, int v, int64_t c, float share) {
            for (; v < q.vectors; v++) {
                Ints seen = visible(load(room.s + r * ROWS + v * W));
                add_to(of_class(SEEN, c, v), seen ? all(share) : Floats{});
            }
        });
    }

    void scale_classes() const {
        for (int64_t c = 0; c < a.C; c++)
            for (int v = 0; v < q.vectors; v++)
                for (Measure m : {MASS, SHARE}) {
                    float *sum = of_class(m, c, v);
                    store(sum, load(sum) * factor[v]);
                }
    }

    void add_classes(const Block &k) const {
        each_member(k, [&](int r, int v, int64_t c, float share) {
            for (; v < q.vectors; v++) {
                Floats p = load(room.s + r * ROWS + v * W) * share;
                add_to(of_class(MASS, c, v), p);
                if (a.key_norms) add_to(of_class(SHARE, c, v), p * norms(v, k.start + r));
            }
        });
    }

    End last_of(int v) const {
        End end = {peak[v], total[v], moment[v], total[v], {}, {}};
        end.none = peak[v] < NONE;
        if (a.sinks) {
            Floats sink = {}, real = peak[v];
            for (int i = 0; i < W && v * W + i < q.n; i++) sink[i] = a.sinks[q.head[v * W + i]];
            end.peak = larger(sink, real);
            Floats down = real - end.peak, less = exponential(down);
            end.moment = less * (end.moment + down * end.kept);
            end.kept *= less;
            end.total = end.kept + exponential(sink - end.peak);
            end.weight = less;
        } else {
            end.weight = all(1.0f);
        }
        Ints nothing = end.total == 0;
        end.weight = nothing ? Floats{} : end.weight / end.total;
        return end;
    }

    void write_rows(int v, int n, const End &end) const {
        int64_t row = q.row(v * W);
        Ints nothing = end.total == 0, no_number = end.total != end.total;
        Floats log_total = logarithm(end.total);
        Floats top = a.bias || a.by_distance ? unbiased[v] : peak[v], none = all(-INFINITY);
        auto write = [&](float *to, Floats x) { if (to) memcpy(to + row, &x, 4 * n); };
        write(a.lse, nothing ? none : end.peak + log_total);
        write(a.max_logit, no_number ? end.total : top < NONE ? none : top);
        write(a.max_weight, end.weight);
        write(a.peak, peak[v]);
        write(a.peak_weight, end.weight);
        write(a.sink, nothing ? all(1.0f) : 1.0f - end.kept / end.total);
        write(a.participation, total[v] == 0 ? Floats{} : total[v] * total[v] / squares[v]);
        Floats nats = (log_total * end.kept - end.moment) / end.total;
        // A row of one key has an entropy of 0; rounding must not make it negative.
        write(a.entropy, nothing | (nats < 0) ? Floats{} : nats);
        write(a.distance, distance[v] * end.weight);
        Floats seen = __builtin_convertvector(n_keys[v], Floats);
        write(a.even_distance, even[v] / larger(all(1.0f), seen));
        for (int i = 0; i < n; i++) {
            if (a.n_keys) a.n_keys[row + i] = n_keys[v][i];
            if (a.argmax) a.argmax[row + i] = end.none[i] ? -1 : largest[v][i];
        }
    }

    void write_keys(int v, int n, const End &end) const {
        for (int64_t c = 0; c < a.N; c++) {
            Floats z = load(room.picked + c * ROWS + v * W);
            Ints seen = visible(z), same = (z == peak[v]) & seen;
            Floats p = seen ? exponential(z - peak[v]) : Floats{};
            for (int i = 0; i < n; i++) {
                int64_t to = q.row(v * W + i) * a.N + c;
                if (a.key_mass) a.key_mass[to] = p[i] * end.weight[i];
                if (a.key_seen) a.key_seen[to] = seen[i] != 0;
                if (a.key_top) a.key_top[to] = same[i] ? 1.0f / ties[v][i] : 0;
                if (!a.key_share) continue;
                int lane = v * W + i;
                float size = seen[i] ? norm(lane, room.key_at[c * ROWS + lane]) : 0;
                a.key_share[to] = p[i] * size / normed[v][i];
            }
        }
    }

    void write_classes(int v, int n, const End &end) const {
        for (int64_t c = 0; c < a.C; c++)
            for (int i = 0; i < n; i++) {
                int64_t to = q.row(v * W + i) * a.C + c;
                bool none = end.none[i];
                auto found = [&](Measure m) { return of_class(m, c, v)[i]; };
                if (a.class_mass) a.class_mass[to] = found(MASS) * end.weight[i];
                if (a.class_top) a.class_top[to] = none ? 0 : found(TOP) / ties[v][i];
                if (a.class_share) a.class_share[to] = found(SHARE) / normed[v][i];
                if (a.class_keys) a.class_keys[to] = found(SEEN) + room.common[c];
            }
    }
};
