// Keys and values of a head, widened and laid one after the other, once for all its queries.
//
// Every tile of queries reads all keys that it sees. Where other heads lie between these, or they
// have to be widened, the tiles of a thread share a copy, which the second cache holds for them.
#pragma once
#include "block_products.hpp"

// Numbers of a copy, up to twice the second cache; and tiles of a thread that pay for one.
constexpr int64_t MOST_COPIED = 1 << 20, LEAST_TILES = 4;

// Whether heads are copied: not where a tile may see a small part of the keys, nor where pairs of
// bfloat16 are multiplied in vectors, which are read in place.
inline bool copies_heads(const Problem &problem) {
    int64_t wide = padded_width(problem.D) + padded_width(problem.Dv);
    if (problem.packed || problem.documents) return false;
    if (uses_tiles(problem)) wide /= 2;
    else if (QueryTile::uses_pairs(problem)) return false;
    if (problem.S * wide > MOST_COPIED) return false;
    int64_t seen = std::min(problem.T, std::min(problem.left, problem.S) + problem.right);
    // For AMX tiles values are transposed, which costs as much for each tile as for the copy.
    if (uses_tiles(problem)) return seen * (problem.H / problem.Hkv) > ROWS * problem.threads;
    if (seen < LEAST_TILES * ROWS * problem.threads) return false;
    return problem.dtype != FLOAT32 || problem.k_stride[2] != problem.D;
}

// Numbers of the copies of keys or of values.
inline int64_t copy_size(const Problem &problem, int64_t width) {
    if (!copies_heads(problem)) return 0;
    // Tiles read beyond the last key, and the values block by block.
    if (uses_tiles(problem)) return (problem.S + 2 * KEYS) * width / 2;
    return problem.S * padded_width(width);
}

// Which head a thread has copied last.
struct WholeHead {
    int64_t latest = -1;

    void copy(const QueryTile &queries, const Workspace &workspace) {
        const Problem &problem = queries.problem;
        int64_t head = queries.b * problem.Hkv + queries.h / (problem.H / problem.Hkv);
        if (!workspace.all_keys || head == latest) return;
        latest = head;
        if (uses_tiles(problem)) return copy_for_tiles(queries, workspace);
        with_element_type(problem, [&]<class Stored>() {
            copy_rows(queries.shared<Stored>(problem.k, problem.k_stride, 0), problem.k_stride[2],
                      problem.S, problem.D, workspace.all_keys);
            copy_rows(queries.shared<Stored>(problem.v, problem.v_stride, 0), problem.v_stride[2],
                      problem.S, problem.Dv, workspace.all_values);
        });
    }

  private:
    static void copy_for_tiles(const QueryTile &queries, const Workspace &workspace) {
        const Problem &problem = queries.problem;
        auto values = reinterpret_cast<BFloat16 *>(workspace.all_values);
        pack_tile_rows(queries.shared<BFloat16>(problem.k, problem.k_stride, 0),
                       problem.k_stride[2], problem.S, problem.S + 2 * KEYS, problem.D,
                       reinterpret_cast<BFloat16 *>(workspace.all_keys));
        for (int64_t first = 0; first < problem.S; first += KEYS)
            pack_tile_columns(queries.shared<BFloat16>(problem.v, problem.v_stride, first),
                              problem.v_stride[2], std::min<int64_t>(KEYS, problem.S - first),
                              problem.Dv, values + first * problem.Dv);
    }

    template <class Stored>
    static void copy_rows(const Stored *from, int64_t stride, int64_t n, int64_t columns,
                          float *to) {
        for (int64_t first = 0; first < n; first += KEYS) {
            int64_t count = std::min<int64_t>(KEYS, n - first), after = first + count;
            prefetch(from + after * stride, stride, std::min<int64_t>(KEYS, n - after), columns);
            pack_rows<float>(from + first * stride, stride, count, columns,
                             to + first * padded_width(columns));
        }
    }
};
