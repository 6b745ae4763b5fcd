// The keys and values of one head, packed once for all its tiles of queries.
//
// Every tile of queries reads all keys that it sees. Where rows of other heads lie between them, or
// they have to be widened, the tiles of a thread share a packed copy, which the L2 cache holds.
#pragma once
#include "block_products.hpp"

// The most numbers of a packed head: up to twice the L2 cache. And how many tiles of a thread pay
// for packing.
constexpr int64_t MOST_PACKED = 1 << 20, LEAST_TILES = 4;

// Whether heads are packed: not where a tile may see a small part of the keys, nor where pairs of
// bfloat16 are multiplied in vectors, which are read in place.
inline bool packs_heads(const Problem &problem) {
    int64_t width = padded_width(problem.D) + padded_width(problem.Dv);
    if (problem.packed || problem.documents) return false;
    if (uses_tiles(problem)) width /= 2;
    else if (QueryTile::uses_pairs(problem)) return false;
    if (problem.S * width > MOST_PACKED) return false;
    int64_t seen = std::min(problem.T, std::min(problem.left, problem.S) + problem.right);
    // For AMX tiles values are transposed, which costs as much for each tile as for the whole head.
    if (uses_tiles(problem)) return seen * (problem.H / problem.Hkv) > TILE_LANES * problem.threads;
    if (seen < LEAST_TILES * TILE_LANES * problem.threads) return false;
    return problem.dtype != FLOAT32 || problem.k_stride[2] != problem.D;
}

// How many numbers the packed keys, or values, of a head take.
inline int64_t packed_head_size(const Problem &problem, int64_t width) {
    if (!packs_heads(problem)) return 0;
    // Tiles read beyond the last key, and the values block by block.
    if (uses_tiles(problem)) return (problem.S + 2 * BLOCK_KEYS) * width / 2;
    return problem.S * padded_width(width);
}

// The head that a thread packed last.
struct PackedHead {
    int64_t latest = -1;

    // Packs the head of some queries, unless it is the latest.
    void pack(const QueryTile &queries, const Workspace &workspace) {
        const Problem &problem = queries.problem;
        int64_t head = queries.b * problem.Hkv + queries.h / (problem.H / problem.Hkv);
        if (!workspace.all_keys || head == latest) return;
        latest = head;
        if (uses_tiles(problem)) return pack_for_tiles(queries, workspace);
        with_element_type(problem, [&]<class Stored>() {
            pack_all(queries.kv_row_ptr<Stored>(problem.k, problem.k_stride, 0),
                     problem.k_stride[2], problem.S, problem.D, workspace.all_keys);
            pack_all(queries.kv_row_ptr<Stored>(problem.v, problem.v_stride, 0),
                     problem.v_stride[2], problem.S, problem.Dv, workspace.all_values);
        });
    }

  private:
    static void pack_for_tiles(const QueryTile &queries, const Workspace &workspace) {
        const Problem &problem = queries.problem;
        auto values = reinterpret_cast<BFloat16 *>(workspace.all_values);
        pack_tile_rows(queries.kv_row_ptr<BFloat16>(problem.k, problem.k_stride, 0),
                       problem.k_stride[2], problem.S, problem.S + 2 * BLOCK_KEYS, problem.D,
                       reinterpret_cast<BFloat16 *>(workspace.all_keys));
        for (int64_t first = 0; first < problem.S; first += BLOCK_KEYS)
            pack_tile_columns(queries.kv_row_ptr<BFloat16>(problem.v, problem.v_stride, first),
                              problem.v_stride[2], std::min<int64_t>(BLOCK_KEYS, problem.S - first),
                              problem.Dv, values + first * problem.Dv);
    }

    // Packs n rows block by block, each while the next is prefetched.
    template <class Stored>
    static void pack_all(const Stored *from, int64_t stride, int64_t n, int64_t columns,
                         float *to) {
        for (int64_t first = 0; first < n; first += BLOCK_KEYS) {
            int64_t count = std::min<int64_t>(BLOCK_KEYS, n - first), next = first + count;
            prefetch(from + next * stride, stride, std::min<int64_t>(BLOCK_KEYS, n - next),
                     columns);
            pack_rows<float>(from + first * stride, stride, count, columns,
                             to + first * padded_width(columns));
        }
    }
};
