// The online softmax of a tile of queries, and the statistics of its weights.
//
// Exponentials are relative to the largest logit so far. When a larger one comes, the sums are
// rescaled; so one pass over the keys is enough for everything that is a sum over weights.
#pragma once
#include <cmath>

#include "classes.hpp"
#include "distances.hpp"
#include "largest_keys.hpp"
#include "single_keys.hpp"

struct OnlineSoftmax {
    const QueryTile &queries;
    const Problem &problem;
    const Workspace &workspace;
    Floats peak[V], total[V] = {}, moment[V] = {};  // sums of p and of p * ln(p / largest p)
    Floats total_lost[V] = {}, moment_lost[V] = {};  // what rounding has added to them
    Floats factor[V];                                // rescales the sums of earlier blocks
    bool rescaled = false;                           // whether that is not 1 everywhere
    Floats unbiased[V];                              // the largest logit without bias
    Floats squares[V] = {}, normed[V] = {};          // sums of p * p, and of p * norm of the key
    Ints n_keys[V] = {};
    LargestKeys largest;
    Distances distances;
    SingleKeys single_keys;
    Classes classes;

    explicit OnlineSoftmax(const QueryTile &queries)
        : queries(queries), problem(queries.problem), workspace(queries.workspace),
          largest(queries), distances(queries), single_keys(queries), classes(queries) {
        for (int vec = 0; vec < V; vec++) peak[vec] = unbiased[vec] = broadcast(MASKED);
    }

    // Takes in the logits of a block before the bias: which keys are visible, and the largest.
    void add_unbiased(const Block &block) {
        for (int vec = 0; vec < queries.vectors; vec++) {
            if (problem.n_keys || problem.even_distance) n_keys[vec] += count_visible(block, vec);
            if (problem.bias || problem.by_distance)
                queries.each(block, vec, [&](Floats s, int) {
                    unbiased[vec] = larger(unbiased[vec], s);
                });
        }
        if (problem.even_distance) distances.add_even(block);
        if (block.has_masked && problem.class_keys) classes.count(block);
    }

    // Takes in the logits of a block, and leaves their exponentials in place.
    template <class Element = float> void add(const Block &block) {
        rescaled = false;
        Floats kept[V];  // 0 where the largest logits before do not count
        for (int vec = 0; vec < queries.vectors; vec++) kept[vec] = update_peak(block, vec);
        if (problem.class_top) classes.add_largest(block, peak, kept);
        if (problem.N) single_keys.pick(block);
        for (int vec = 0; vec < queries.vectors; vec++) {
            if (problem.entropy) exponentials<true, Element>(block, vec);
            else exponentials<false, Element>(block, vec);
            if (problem.participation)
                squares[vec] +=
                    queries.sum_over(block, vec, [&](Floats p, int) { return p * p; });
            if (problem.key_norms)
                normed[vec] += queries.sum_over(block, vec, [&](Floats p, int r) {
                    return p * queries.key_norms(vec, block.start + r);
                });
            if (problem.distance) distances.add_weighted(block, vec);
        }
        classes.add(block, factor);
    }

    // Takes in the sums of the keys that come after these, for the same rows.
    void merge(OnlineSoftmax &next) {
        for (int vec = 0; vec < queries.vectors; vec++) {
            Floats before = peak[vec], after = next.peak[vec], top = larger(before, after);
            merge_largest(next, vec, after > before, after >= before);
            rescale(vec, top);
            next.rescale(vec, top);
            add_exactly(total[vec], total_lost[vec], next.total[vec]);
            add_exactly(moment[vec], moment_lost[vec], next.moment[vec]);
            squares[vec] += next.squares[vec];
            distances.weighted[vec] += next.distances.weighted[vec];
            distances.even[vec] += next.distances.even[vec];
            normed[vec] += next.normed[vec];
            n_keys[vec] += next.n_keys[vec];
            unbiased[vec] = larger(unbiased[vec], next.unbiased[vec]);
            classes.merge(Classes::SEEN, next.classes, vec, broadcast(1.0f), broadcast(1.0f));
            for (auto sum : {Classes::MASS, Classes::NORMED})
                classes.merge(sum, next.classes, vec, factor[vec], next.factor[vec]);
            single_keys.merge(next.single_keys, vec);
        }
        for (int64_t c = 0; c < problem.C; c++)
            workspace.shared_members[c] += next.workspace.shared_members[c];
    }

    // Rows at their end: sums of exponentials relative to the peak, with the part of a sink.
    struct FinishedRows {
        Floats peak, kept, moment, total, weight;  // weight: of a key that has the largest logit
        Ints none;                                 // rows that see no key
    };

    FinishedRows finish_rows(int vec) const {
        FinishedRows end = {peak[vec], total[vec], moment[vec], total[vec], {}, {}};
        end.none = peak[vec] < MASKED_BELOW;
        if (problem.sinks) {
            Floats sink = {}, real = peak[vec];
            for (int i = 0; i < W && vec * W + i < queries.n; i++)
                sink[i] = problem.sinks[queries.head[vec * W + i]];
            end.peak = larger(sink, real);
            Floats down = real - end.peak, less = exponential(down);
            end.moment = less * (end.moment + down * end.kept);
            end.kept *= less;
            end.total = end.kept + exponential(sink - end.peak);
            end.weight = less;
        } else {
            end.weight = broadcast(1.0f);
        }
        Ints empty = end.total == 0;
        end.weight = empty ? Floats{} : end.weight / end.total;
        return end;
    }

    // Writes all requested outputs; `write_heads` gets the factor that turns sums into heads.
    template <class Heads> void finish(Heads write_heads) const {
        for (int vec = 0; vec < queries.vectors; vec++) {
            int n = std::min(W, queries.n - vec * W);
            FinishedRows end = finish_rows(vec);
            if (problem.heads) write_heads(vec, n, end.weight);
            write_rows(vec, n, end);
            Floats ties = largest.ties[vec];
            if (problem.N)
                single_keys.write(vec, n, peak[vec], end.weight, ties, normed[vec]);
            if (problem.C)
                classes.write(vec, n, end.weight, normed[vec], end.none ? Floats{} : ties);
        }
    }

  private:
    Ints count_visible(const Block &block, int vec) const {
        if (!block.has_masked) return broadcast_ints(block.counts[vec]);
        Ints count = {};
        queries.each(block, vec, [&](Floats s, int) { count -= visible(s); });
        return count;
    }

    Floats update_peak(const Block &block, int vec) {
        Floats highest = largest_logit(block, vec), top = larger(peak[vec], highest);
        bool counted = problem.key_top || problem.class_top;
        if (counted && any(highest >= peak[vec])) largest.add<true>(block, vec, peak[vec], top);
        else if (problem.argmax && any(highest > peak[vec]))
            largest.add<false>(block, vec, peak[vec], top);
        Floats kept = top > peak[vec] ? Floats{} : broadcast(1.0f);
        rescale(vec, top);
        return kept;
    }

    // Sums relative to the largest logit so far become relative to a larger one.
    void rescale(int vec, Floats top) {
        // Rows without a visible key so far have sums of 0, which any factor leaves.
        Floats down = peak[vec] - top;
        peak[vec] = top;
        factor[vec] = exponential(down);
        rescaled |= any(down < 0);
        moment[vec] = factor[vec] * (moment[vec] + down * total[vec]);
        total[vec] *= factor[vec];
        total_lost[vec] *= factor[vec];
        moment_lost[vec] *= factor[vec];
        distances.weighted[vec] *= factor[vec];
        normed[vec] *= factor[vec];
        squares[vec] *= factor[vec] * factor[vec];
    }

    Floats largest_logit(const Block &block, int vec) const {
        auto join = [](Floats x, Floats s) { return larger(x, s); };
        return queries.reduce(block, vec, broadcast(MASKED), join, [](Floats s, int) { return s; });
    }

    // The largest logits of `next` count where they are larger (`risen`), or as large (`same`).
    void merge_largest(const OnlineSoftmax &next, int vec, Ints risen, Ints same) {
        Floats mine = risen ? Floats{} : broadcast(1.0f);
        Floats theirs = same ? broadcast(1.0f) : Floats{};
        classes.merge(Classes::TOP, next.classes, vec, mine, theirs);
        largest.merge(next.largest, vec, risen, mine, theirs);
    }

    template <bool moments, class Element> void exponentials(const Block &block, int vec) {
        // The sums of a block are accumulated separately, and the rounding of adding them is kept
        // (Kahan 1965), so that many small terms are not lost.
        Floats top = peak[vec] < MASKED_BELOW ? Floats{} : peak[vec], sum = {}, block_moment = {};
        float *s = workspace.logits + vec * W;
        auto take = [&](int r) {
            Floats x = load(s + r * ROWS) - top;
            Floats p = exponential(x);
            sum += p;
            if (moments) block_moment += p * x;
            store(s + r * ROWS, p);
            return p;
        };
        if constexpr (std::is_same_v<Element, Pair>) {
            float *pairs = workspace.pairs + vec * W;
            int r = 0;
            for (; r + 2 <= block.counts[vec]; r += 2)
                store(pairs + r / 2 * ROWS, paired_weights(take(r), take(r + 1)));
            if (r < block.counts[vec]) store(pairs + r / 2 * ROWS, paired_weights(take(r), Floats{}));
            // Tiles are multiplied whole.
            if constexpr (TILES)
                for (int i = (block.counts[vec] + 1) / 2; i < KEYS / 2; i++)
                    store(pairs + i * ROWS, Floats{});
        } else {
            for (int r = 0; r < block.counts[vec]; r++) take(r);
        }
        add_exactly(total[vec], total_lost[vec], sum);
        if (moments) add_exactly(moment[vec], moment_lost[vec], block_moment);
    }

    static void add_exactly(Floats &sum, Floats &lost, Floats more) {
        Floats due = more - lost, next = sum + due;
        lost = (next - sum) - due;
        sum = next;
    }

    void write_rows(int vec, int n, const FinishedRows &end) const {
        int64_t row = queries.row(vec * W);
        Ints empty = end.total == 0, not_a_number = end.total != end.total;
        Floats log_total = logarithm(end.total), none = broadcast(-INFINITY);
        Floats top = problem.bias || problem.by_distance ? unbiased[vec] : peak[vec];
        auto write = [&](float *to, Floats x) { if (to) store_some(to + row, x, n); };
        write(problem.lse, empty ? none : end.peak + log_total);
        write(problem.max_logit, not_a_number ? end.total : top < MASKED_BELOW ? none : top);
        write(problem.max_weight, end.weight);
        write(problem.sink, empty ? broadcast(1.0f) : 1.0f - end.kept / end.total);
        write(problem.participation,
              total[vec] == 0 ? Floats{} : total[vec] * total[vec] / squares[vec]);
        Floats nats = (log_total * end.kept - end.moment) / end.total;
        // A row of one key has an entropy of 0; rounding must not make it negative.
        write(problem.entropy, empty | (nats < 0) ? Floats{} : nats);
        write(problem.distance, distances.weighted[vec] * end.weight);
        Floats seen = __builtin_convertvector(n_keys[vec], Floats);
        write(problem.even_distance, distances.even[vec] / larger(broadcast(1.0f), seen));
        for (int i = 0; i < n; i++) {
            if (problem.n_keys) problem.n_keys[row + i] = n_keys[vec][i];
            if (problem.argmax) problem.argmax[row + i] = end.none[i] ? -1 : largest.first[vec][i];
        }
    }
};
