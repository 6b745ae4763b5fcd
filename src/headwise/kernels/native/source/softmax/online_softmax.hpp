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
    Floats row_max[TILE_VECTORS];         // the largest logit so far, with its bias
    Floats row_sum[TILE_VECTORS] = {};    // sums of p = exp(logit - row_max)
    Floats moment[TILE_VECTORS] = {};     // sums of p * ln p
    // What rounding has added to these two sums.
    Floats sum_error[TILE_VECTORS] = {}, moment_error[TILE_VECTORS] = {};
    Floats factor[TILE_VECTORS];          // rescales the sums of earlier blocks
    bool rescaled = false;                // whether that is not 1 everywhere
    Floats unbiased[TILE_VECTORS];        // the largest logit without bias
    Floats squares[TILE_VECTORS] = {};    // sums of p * p
    Floats norm_sum[TILE_VECTORS] = {};   // sums of p * norm of the key
    Ints n_keys[TILE_VECTORS] = {};
    LargestKeys largest;
    Distances distances;
    SingleKeys single_keys;
    Classes classes;

    explicit OnlineSoftmax(const QueryTile &queries)
        : queries(queries), problem(queries.problem), workspace(queries.workspace),
          largest(queries), distances(queries), single_keys(queries), classes(queries) {
        for (int vec = 0; vec < TILE_VECTORS; vec++)
            row_max[vec] = unbiased[vec] = broadcast(MASKED);
    }

    // Takes in the logits of a block before the bias: which keys are visible, and the largest.
    void add_unbiased(const Block &block) {
        for (int vec = 0; vec < queries.vectors; vec++) {
            if (problem.n_keys || problem.even_distance) n_keys[vec] += count_visible(block, vec);
            if (problem.bias || problem.by_distance)
                queries.for_each_key(block, vec, [&](Floats s, int) {
                    unbiased[vec] = maximum(unbiased[vec], s);
                });
        }
        if (problem.distance) distances.locate(block);
        for (int vec = 0; vec < queries.vectors && problem.even_distance; vec++)
            distances.add_even(block, vec);
        if (block.has_masked && problem.class_keys) classes.count(block);
    }

    // Takes in the logits of a block, and leaves their exponentials in place.
    template <class Element = float> void add(const Block &block) {
        rescaled = false;
        // 0 where a larger logit voids the largest ones of earlier blocks.
        Floats kept[TILE_VECTORS];
        for (int vec = 0; vec < queries.vectors; vec++) kept[vec] = update_row_max(block, vec);
        if (problem.class_top) classes.add_largest(block, row_max, kept);
        if (problem.N) single_keys.gather(block);
        for (int vec = 0; vec < queries.vectors; vec++) {
            const float *from_nearest = problem.distance ? distances.from_nearest(vec) : nullptr;
            if (from_nearest) exponentials<true, true, Element>(block, vec, from_nearest);
            else if (problem.entropy) exponentials<true, false, Element>(block, vec);
            else exponentials<false, false, Element>(block, vec);
            if (problem.participation)
                squares[vec] +=
                    queries.sum_over(block, vec, [&](Floats p, int) { return p * p; });
            if (problem.key_norms)
                norm_sum[vec] += queries.sum_over(block, vec, [&](Floats p, int r) {
                    return p * queries.key_norms(vec, block.start + r);
                });
            if (problem.distance && !from_nearest) distances.add_weighted(block, vec);
        }
        classes.add(block, factor);
    }

    // Takes in the sums of the keys that come after these, for the same rows.
    void merge(OnlineSoftmax &next) {
        for (int vec = 0; vec < queries.vectors; vec++) {
            Floats before = row_max[vec], after = next.row_max[vec], top = maximum(before, after);
            merge_largest(next, vec, after > before, after >= before);
            rescale(vec, top);
            next.rescale(vec, top);
            kahan_add(row_sum[vec], sum_error[vec], next.row_sum[vec]);
            kahan_add(moment[vec], moment_error[vec], next.moment[vec]);
            squares[vec] += next.squares[vec];
            distances.weighted[vec] += next.distances.weighted[vec];
            distances.even[vec] += next.distances.even[vec];
            norm_sum[vec] += next.norm_sum[vec];
            n_keys[vec] += next.n_keys[vec];
            unbiased[vec] = maximum(unbiased[vec], next.unbiased[vec]);
            classes.merge(Classes::SEEN, next.classes, vec, broadcast(1.0f), broadcast(1.0f));
            for (auto sum : {Classes::MASS, Classes::NORMED})
                classes.merge(sum, next.classes, vec, factor[vec], next.factor[vec]);
            single_keys.merge(next.single_keys, vec);
        }
        for (int64_t c = 0; c < problem.C; c++)
            workspace.shared_members[c] += next.workspace.shared_members[c];
    }

    // Rows after their last key: sums of exponentials relative to the largest logit, sink included.
    struct FinishedRows {
        Floats row_max;
        Floats key_sum;     // of the keys alone
        Floats moment;
        Floats row_sum;     // of the keys and the sink
        Floats max_weight;  // the weight of a key that has the largest logit
        Ints none;          // rows that see no key
    };

    FinishedRows finish_rows(int vec) const {
        FinishedRows end = {row_max[vec], row_sum[vec], moment[vec], row_sum[vec], {}, {}};
        end.none = row_max[vec] < MASKED_BELOW;
        if (problem.sinks) {
            Floats sink = {}, key_max = row_max[vec];
            for (int i = 0; i < W && vec * W + i < queries.n; i++)
                sink[i] = problem.sinks[queries.head[vec * W + i]];
            end.row_max = maximum(sink, key_max);
            Floats shift = key_max - end.row_max, scale = exp(shift);
            end.moment = scale * (end.moment + shift * end.key_sum);
            end.key_sum *= scale;
            end.row_sum = end.key_sum + exp(sink - end.row_max);
            end.max_weight = scale;
        } else {
            end.max_weight = broadcast(1.0f);
        }
        Ints empty = end.row_sum == 0;
        end.max_weight = empty ? Floats{} : end.max_weight / end.row_sum;
        return end;
    }

    // Writes all requested outputs; `write_heads` gets the factor that turns sums into heads.
    template <class Heads> void finish(Heads write_heads) const {
        for (int vec = 0; vec < queries.vectors; vec++) {
            int n = std::min(W, queries.n - vec * W);
            FinishedRows end = finish_rows(vec);
            if (problem.heads) write_heads(vec, n, end.max_weight);
            write_rows(vec, n, end);
            Floats ties = largest.ties[vec];
            if (problem.N)
                single_keys.write(vec, n, row_max[vec], end.max_weight, ties, norm_sum[vec]);
            if (problem.C)
                classes.write(vec, n, end.max_weight, norm_sum[vec], end.none ? Floats{} : ties);
        }
    }

  private:
    Ints count_visible(const Block &block, int vec) const {
        if (!block.has_masked) return broadcast_ints(block.counts[vec]);
        Ints count = {};
        queries.for_each_key(block, vec, [&](Floats s, int) { count -= visible(s); });
        return count;
    }

    Floats update_row_max(const Block &block, int vec) {
        Floats highest = largest_logit(block, vec), top = maximum(row_max[vec], highest);
        bool counts_ties = problem.key_top || problem.class_top;
        if (counts_ties && any(highest >= row_max[vec]))
            largest.add<true>(block, vec, row_max[vec], top);
        else if (problem.argmax && any(highest > row_max[vec]))
            largest.add<false>(block, vec, row_max[vec], top);
        Floats kept = top > row_max[vec] ? Floats{} : broadcast(1.0f);
        rescale(vec, top);
        return kept;
    }

    // Sums relative to the largest logit so far become relative to a larger one.
    void rescale(int vec, Floats top) {
        // Rows without a visible key so far have sums of 0, which any factor leaves.
        Floats shift = row_max[vec] - top;
        row_max[vec] = top;
        factor[vec] = exp(shift);
        rescaled |= any(shift < 0);
        moment[vec] = factor[vec] * (moment[vec] + shift * row_sum[vec]);
        row_sum[vec] *= factor[vec];
        sum_error[vec] *= factor[vec];
        moment_error[vec] *= factor[vec];
        distances.weighted[vec] *= factor[vec];
        norm_sum[vec] *= factor[vec];
        squares[vec] *= factor[vec] * factor[vec];
    }

    Floats largest_logit(const Block &block, int vec) const {
        auto join = [](Floats x, Floats s) { return maximum(x, s); };
        return queries.reduce(block, vec, broadcast(MASKED), join, [](Floats s, int) { return s; });
    }

    // The largest logits of `next` count where they are larger (`risen`), or as large (`same`).
    void merge_largest(const OnlineSoftmax &next, int vec, Ints risen, Ints same) {
        Floats keep = risen ? Floats{} : broadcast(1.0f);
        Floats keep_next = same ? broadcast(1.0f) : Floats{};
        classes.merge(Classes::TOP, next.classes, vec, keep, keep_next);
        largest.merge(next.largest, vec, risen, keep, keep_next);
    }

    // With moments if requested, and distances from the nearest key.
    template <bool moments, bool distant, class Element>
    void exponentials(const Block &block, int vec, const float *from_nearest = nullptr) {
        // The sums of a block are accumulated separately, and the rounding of adding them is kept
        // (Kahan 1965), so that many small terms are not lost.
        Floats top = row_max[vec] < MASKED_BELOW ? Floats{} : row_max[vec];
        Floats block_sum = {}, block_moment = {}, block_distance = {};
        float *s = workspace.logits + vec * W;
        auto exponentiate = [&](int r) {
            Floats x = load(s + r * TILE_LANES) - top;
            Floats p = exp(x);
            block_sum += p;
            if (moments) block_moment += p * x;
            if (distant) block_distance += p * from_nearest[r];
            store(s + r * TILE_LANES, p);
            return p;
        };
        if constexpr (std::is_same_v<Element, BFloat16Pair>) {
            float *pairs = workspace.pairs + vec * W;
            int r = 0;
            for (; r + 2 <= block.counts[vec]; r += 2)
                store(pairs + r / 2 * TILE_LANES,
                      paired_weights(exponentiate(r), exponentiate(r + 1)));
            if (r < block.counts[vec])
                store(pairs + r / 2 * TILE_LANES, paired_weights(exponentiate(r), Floats{}));
            // Tiles are multiplied whole.
            if constexpr (HAS_AMX)
                for (int i = (block.counts[vec] + 1) / 2; i < BLOCK_KEYS / 2; i++)
                    store(pairs + i * TILE_LANES, Floats{});
        } else {
            for (int r = 0; r < block.counts[vec]; r++) exponentiate(r);
        }
        kahan_add(row_sum[vec], sum_error[vec], block_sum);
        if (moments) kahan_add(moment[vec], moment_error[vec], block_moment);
        if (distant) distances.add_weighted(vec, block_sum, block_distance);
    }

    static void kahan_add(Floats &sum, Floats &error, Floats term) {
        Floats corrected = term - error, next = sum + corrected;
        error = (next - sum) - corrected;
        sum = next;
    }

    void write_rows(int vec, int n, const FinishedRows &end) const {
        int64_t row = queries.row(vec * W);
        Ints empty = end.row_sum == 0, not_a_number = end.row_sum != end.row_sum;
        Floats log_sum = log(end.row_sum), none = broadcast(-INFINITY);
        Floats top = problem.bias || problem.by_distance ? unbiased[vec] : row_max[vec];
        auto write = [&](float *to, Floats x) { if (to) store_some(to + row, x, n); };
        write(problem.lse, empty ? none : end.row_max + log_sum);
        write(problem.max_logit, not_a_number ? end.row_sum : top < MASKED_BELOW ? none : top);
        write(problem.max_weight, end.max_weight);
        write(problem.sink, empty ? broadcast(1.0f) : 1.0f - end.key_sum / end.row_sum);
        write(problem.participation,
              row_sum[vec] == 0 ? Floats{} : row_sum[vec] * row_sum[vec] / squares[vec]);
        Floats nats = (log_sum * end.key_sum - end.moment) / end.row_sum;
        // A row of one key has an entropy of 0; rounding must not make it negative.
        write(problem.entropy, empty | (nats < 0) ? Floats{} : nats);
        write(problem.distance, distances.weighted[vec] * end.max_weight);
        Floats seen = __builtin_convertvector(n_keys[vec], Floats);
        write(problem.even_distance, distances.even[vec] / maximum(broadcast(1.0f), seen));
        for (int i = 0; i < n; i++) {
            if (problem.n_keys) problem.n_keys[row + i] = n_keys[vec][i];
            if (problem.argmax) problem.argmax[row + i] = end.none[i] ? -1 : largest.first[vec][i];
        }
    }
};
