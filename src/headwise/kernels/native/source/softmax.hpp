// The running softmax of a strip, and all that is said about its weights.
//
// Exponentials are taken relative to the largest logit so far. When a larger one comes, what was summed
// is scaled down; so one pass over the keys is enough for everything that is a sum over weights.
#pragma once
#include <cmath>

#include "classes.hpp"

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
    float first_at[V], last_at[V];  // the lowest and the highest of those
    Ints n_keys[V] = {}, largest[V] = {};  // the first key that has the largest logit
    Floats ties[V] = {};                   // and how many have
    Classes classes;

    explicit Softmax(const Strip &q) : q(q), a(q.a), room(q.room), classes(q) {
        for (int v = 0; v < V; v++) {
            peak[v] = unbiased[v] = all(HIDDEN);
            first_at[v] = INFINITY, last_at[v] = -INFINITY;
        }
        std::fill_n(room.picked, a.N * ROWS, HIDDEN);
        for (int64_t c = 0; c < a.N; c++)
            for (int i = 0; i < q.vectors * W; i++)
                room.key_at[c * ROWS + i] = i < q.n ? a.keys[at(i) * a.N + c] : -1;
        for (int i = 0; i < q.n && a.query_at; i++) {
            float here = query_at[i / W][i % W] = a.query_at[at(i)];
            first_at[i / W] = std::min(first_at[i / W], here);
            last_at[i / W] = std::max(last_at[i / W], here);
        }
    }

    // Take in the logits of a block before the bias: who is seen, and the largest.
    void look(const Block &k) {
        for (int v = 0; v < q.vectors; v++) {
            if (a.n_keys || a.even_distance) n_keys[v] += keys_seen(k, v);
            if (a.bias || a.by_distance)
                each(k, v, [&](Floats s, int) { unbiased[v] = larger(unbiased[v], s); });
        }
        if (a.even_distance) measure_steps(k);
        if (k.edge && a.class_keys) classes.count(k);
    }

    // Take in the logits of a block; what remains of them is their exponentials.
    template <class Number = float> void add(const Block &k) {
        moved = false;
        Floats kept[V];  // 0 where the largest logits before do not count
        for (int v = 0; v < q.vectors; v++) kept[v] = raise(k, v);
        if (a.class_top) classes.find_top(k, peak, kept);
        if (a.N) pick(k);
        for (int v = 0; v < q.vectors; v++) {
            if (a.entropy) exponentials<true, Number>(k, v);
            else exponentials<false, Number>(k, v);
            if (a.participation)
                squares[v] += over(k, v, [&](Floats p, int) { return p * p; });
            if (a.key_norms)
                normed[v] += over(k, v, [&](Floats p, int r) { return p * norms(v, k.start + r); });
            if (a.distance)
                distance[v] += over(k, v, [&](Floats p, int r) { return p * away(k, v, r); });
        }
        classes.add(k, factor, [&](int v, int64_t key) { return norms(v, key); });
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
            classes.merge(Classes::SEEN, next.classes, v, all(1.0f), all(1.0f));
            for (auto sum : {Classes::MASS, Classes::NORMED})
                classes.merge(sum, next.classes, v, factor[v], next.factor[v]);
            for (int64_t c = 0; c < a.N; c++) {
                float *mine = room.picked + c * ROWS + v * W;
                Floats theirs = load(next.room.picked + c * ROWS + v * W);
                store(mine, visible(theirs) ? theirs : load(mine));
            }
        }
        for (int64_t c = 0; c < a.C; c++) room.common[c] += next.room.common[c];
    }

    // A row at its end: sums of exponentials relative to its peak, with the part of a sink.
    struct End {
        Floats peak, kept, moment, total, weight;  // weight: of a key that has the largest logit
        Ints none;                                 // rows that see no key
    };

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

    // Write down everything that was asked for; `write_heads` is told how their sums are weighted.
    template <class Heads> void finish(Heads write_heads) const {
        for (int v = 0; v < q.vectors; v++) {
            int n = std::min(W, q.n - v * W);
            End end = last_of(v);
            if (a.heads) write_heads(v, n, end.weight);
            write_rows(v, n, end);
            if (a.N) write_keys(v, n, end);
            if (a.C) classes.write(v, n, end.weight, normed[v], end.none ? Floats{} : ties[v]);
        }
    }

  private:
    // A query in arrays of [B,T].
    int64_t at(int lane) const { return q.b * a.T + q.query(lane); }
    float norm(int lane, int64_t key) const {
        return a.key_norms[(q.b * a.H + q.head[lane]) * a.S + key];
    }
    Floats norms(int v, int64_t key) const {
        if (q.one_head) return all(norm(0, key));
        Floats found = {};
        for (int i = 0; i < W && v * W + i < q.n; i++) found[i] = norm(v * W + i, key);
        return found;
    }

    template <class Take> void each(const Block &k, int v, Take take) const {
        for (int r = 0; r < k.rows[v]; r++) take(load(room.s + r * ROWS + v * W), r);
    }
    // In four parts: one would wait for itself.
    template <class Join, class Term>
    Floats joined(const Block &k, int v, Floats none, Join join, Term term) const {
        const float *s = room.s + v * W;
        Floats part[4] = {none, none, none, none};
        int r = 0;
        for (; r + 4 <= k.rows[v]; r += 4)
            UNROLL for (int i = 0; i < 4; i++)
                part[i] = join(part[i], term(load(s + (r + i) * ROWS), r + i));
        for (; r < k.rows[v]; r++) part[0] = join(part[0], term(load(s + r * ROWS), r));
        return join(join(part[0], part[1]), join(part[2], part[3]));
    }
    template <class Term> Floats over(const Block &k, int v, Term term) const {
        return joined(k, v, Floats{}, [](Floats x, Floats y) { return x + y; }, term);
    }

    Ints keys_seen(const Block &k, int v) const {
        if (!k.edge) return all_ints(k.rows[v]);
        Ints found = {};
        each(k, v, [&](Floats s, int) { found -= visible(s); });
        return found;
    }

    Floats away(const Block &k, int v, int r) const {
        return absolute(query_at[v] - a.key_at[q.b * a.S + k.start + r]);
    }

    Floats raise(const Block &k, int v) {
        Floats highest = largest_logit(k, v), top = larger(peak[v], highest);
        bool counted = a.key_top || a.class_top;
        if (counted && any(highest >= peak[v])) find_largest<true>(k, v, top);
        else if (a.argmax && any(highest > peak[v])) find_largest<false>(k, v, top);
        Floats kept = top > peak[v] ? Floats{} : all(1.0f);
        rise(v, top);
        return kept;
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

    Floats largest_logit(const Block &k, int v) const {
        auto join = [](Floats x, Floats s) { return larger(x, s); };
        return joined(k, v, all(HIDDEN), join, [](Floats s, int) { return s; });
    }

    template <bool counted> void find_largest(const Block &k, int v, Floats top) {
        Ints risen = top > peak[v], at = all_ints(k.start + k.rows[v]), first = at;
        Floats found = {};
        const float *s = room.s + v * W;
        // From the last to the first, which so remains.
        for (int r = k.rows[v]; r-- > 0;) {
            Ints same = load(s + r * ROWS) == top;
            at -= 1;
            first = same ? at : first;
            if (counted) found += same ? all(1.0f) : Floats{};
        }
        largest[v] = risen ? first : largest[v];
        if (!counted) return;
        ties[v] = (risen ? Floats{} : ties[v]) + found;
    }

    // Where the largest logits are: those of `next` count where they are larger, or as large.
    void merge_largest(const Softmax &next, int v, Ints risen, Ints same) {
        Floats mine = risen ? Floats{} : all(1.0f), theirs = same ? all(1.0f) : Floats{};
        classes.merge(Classes::TOP, next.classes, v, mine, theirs);
        ties[v] = ties[v] * mine + next.ties[v] * theirs;
        largest[v] = risen ? next.largest[v] : largest[v];
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

    // Sums of distances, whatever the weights.
    void measure_steps(const Block &k) {
        const float *at = a.key_at + q.b * a.S + k.start;
        // Keys that all stand on one side of all queries do not need to be looked at one by one.
        Floats low = all(at[0]), high = low, sums = {};
        for (int r = 0; r + W <= k.n; r += W) {
            Floats x = load(at + r);
            low = -larger(-low, -x), high = larger(high, x);
            sums += x - at[0];
        }
        bool whole = !k.edge && k.n % W == 0;
        float steps = whole ? sum(sums) : 0;
        for (int v = 0; v < q.vectors; v++) {
            Floats far = float(k.n) * (query_at[v] - at[0]) - steps;
            bool behind = !any(high > first_at[v]), ahead = !any(low < last_at[v]);
            if (whole && (behind || ahead)) even[v] += absolute(far);
            else even[v] += over(k, v, [&](Floats s, int r) {
                return visible(s) ? away(k, v, r) : Floats{};
            });
        }
    }

    void pick(const Block &k) {
        for (int64_t c = 0; c < a.N; c++) {
            for (int v = 0; v < q.vectors; v++) {
                const int32_t *keys = room.key_at + c * ROWS + v * W;
                Ints r = load(keys) - int32_t(k.start);
                if (!any((r >= 0) & (r < k.rows[v]))) continue;
                for (int i = v * W; i < v * W + W; i++) {
                    int64_t at = room.key_at[c * ROWS + i] - k.start;
                    if (at >= 0 && at < k.rows[v]) room.picked[c * ROWS + i] = room.s[at * ROWS + i];
                }
            }
        }
    }

    void write_rows(int v, int n, const End &end) const {
        int64_t row = q.row(v * W);
        Ints nothing = end.total == 0, no_number = end.total != end.total;
        Floats log_total = logarithm(end.total);
        Floats top = a.bias || a.by_distance ? unbiased[v] : peak[v], none = all(-INFINITY);
        auto write = [&](float *to, Floats x) { if (to) store_some(to + row, x, n); };
        write(a.lse, nothing ? none : end.peak + log_total);
        write(a.max_logit, no_number ? end.total : top < NONE ? none : top);
        write(a.max_weight, end.weight);
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
        int64_t to = q.row(v * W) * a.N;
        const float *picked = room.picked + v * W;
        auto put = [&](auto *found, auto of) {
            if (found) write_columns(n, a.N, found + to, [&](int64_t c) {
                return of(c, load(picked + c * ROWS));
            });
        };
        auto weight = [&](Floats z) { return visible(z) ? exponential(z - peak[v]) : Floats{}; };
        Floats share = 1.0f / ties[v];
        put(a.key_seen, [](int64_t, Floats z) { return visible(z) ? all(1.0f) : Floats{}; });
        put(a.key_mass, [&](int64_t, Floats z) { return weight(z) * end.weight; });
        put(a.key_top, [&](int64_t, Floats z) {
            return visible(z) & (z == peak[v]) ? share : Floats{};
        });
        put(a.key_share, [&](int64_t c, Floats z) {
            Ints seen = visible(z);
            Floats size = {};
            for (int i = 0; i < n; i++)
                if (seen[i]) size[i] = norm(v * W + i, room.key_at[c * ROWS + v * W + i]);
            return weight(z) * size / normed[v];
        });
    }
};
