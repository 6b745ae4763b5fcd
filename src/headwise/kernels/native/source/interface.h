// The problem that Python fills in (`_native_library.py`), and the exported functions.
//
// Every field takes eight bytes or an array of such. A null pointer means that an output is not
// requested, or an input not present. Strides are counted in elements; the last axis of every array
// is dense. Nothing is checked here: Python has done so.
#pragma once
#include <cstdint>

extern "C" {

struct Problem {
    // Queries [B,H,T,D], keys [B,Hkv,S,D], values [B,Hkv,S,Dv]: strides of text, head, token.
    int64_t dtype;  // of these arrays and of the heads: an ElementType
    const void *q, *k, *v;
    int64_t q_stride[3], k_stride[3], v_stride[3];
    int64_t B, H, Hkv, T, S, D, Dv;
    int64_t packed;  // 1: for a few queries of each head, on many keys

    // How logits become weights. Query i is at key position i + S - T.
    double scale, softcap;      // softcap 0: none
    int64_t left, right;        // keys visible on each side of a query's own
    const int64_t *key_range;   // [B,2]: the first key of each text, and one past its last
    const int32_t *documents;   // [B,S]: a query sees the keys of its own document
    const uint8_t *mask;        // [B,H,T,S]: 1 = may attend
    int64_t mask_stride[3];       // of text, head, query; 0 to broadcast
    const float *bias;          // [B,H,T,S]: added to the logits
    int64_t bias_stride[3];
    const float *by_distance;   // [B,H,T+S-1]: added too, at S - 1 + i - j
    int64_t by_distance_stride[2];
    const float *sinks;         // [H]

    // Outputs. All but the heads are dense.
    void *heads;                // [B,H,T,Dv]
    int64_t heads_stride[3];
    int64_t *n_keys, *argmax;   // [B,H,T]
    float *lse, *max_logit, *max_weight, *entropy, *participation, *sink;
    float *distance, *even_distance;
    const float *query_at, *key_at;  // [B,T], [B,S]: positions, for distances

    // Single keys of each query: [B,T,N] in, [B,H,T,N] out. A key outside of 0..S-1 is none.
    int64_t N;
    const int32_t *keys;
    float *key_mass, *key_top, *key_share;
    uint8_t *key_seen;

    // Classes of keys: how much of each a key is, [B,S,C] in, mostly 0. [B,H,T,C] out.
    int64_t C;
    const float *classes;
    float *class_mass, *class_top, *class_share, *class_keys;

    const float *key_norms;     // [B,H,S]: what a key's weight counts for in shares

    // The weights that each key receives from the counted queries are added to this array. Not
    // available where heads are packed.
    const uint8_t *counted;     // [B,T]
    float *received;            // [B,H,S]

    // Gradients. `heads`, `lse` and `entropy` are then inputs. All but the gradients of heads
    // [B,H,T,Dv] may be null: [B,H,T].
    const void *grad_heads;
    const float *grad_lse, *grad_entropy;
    int64_t grad_heads_stride[3];
    float *dq;  // in float32: a sum over tasks
    void *dk, *dv;
    int64_t dq_stride[3], dk_stride[3], dv_stride[3];

    int64_t threads;
};

// A layer whose keys are in vLLM's pages (`kernels/pages.py`, field by field): what does not change
// between steps.
struct PageLayer {
    int64_t dtype, layout;  // an ElementType; 0: [D][page], 1: [page / 16][D / 2][16][2]
    int64_t first_head;  // of this layer among those of all layers in the sums
    int64_t H, Hkv, D, page;
    int64_t window;  // keys that a query sees, itself included; 0: all
    double scale, softcap;
    const void *keys;
    int64_t key_stride[2];  // of block, kv head
};

// The sums of a statistic over the rows that count.
struct PageSums {
    double total, count, even, maximum;  // even: under uniform attention
};

// Rows of one request that are added to the same sums.
struct PageGroup {
    int64_t first, stop, request;
    PageSums *sums;  // [heads of all layers,columns]
    int64_t spans[4][2];  // first position, one past the last
};

// The rows of a step.
struct PageStep {
    int64_t threads, n_groups;
    const PageGroup *groups;
    const int64_t *rows;  // [rows,2]: token in the batch, position in its request
    const void *q;
    int64_t query_stride[2];  // of token, head
    const int32_t *table;     // [requests,blocks]: the number of each block
    int64_t table_stride;
};

// A field of a problem as the compiler lays it out. Python compares these with its own structure
// when it loads a library: two pointers that were swapped on one side would load and compute.
struct Field {
    const char *name;
    int64_t offset, size;
};

#define EXPORTED __attribute__((visibility("default")))
// The result of a call. NOT_FINITE refers to requested heads only.
enum Outcome : int64_t { DONE, NO_MEMORY, NOT_FINITE };
EXPORTED int64_t headwise_forward(const Problem *);
// The heads of other tensors, whose sizes and strides are those of a problem that is complete.
EXPORTED int64_t headwise_heads(const Problem *, const void *q, const void *k, const void *v,
                                void *heads, int64_t threads);
EXPORTED int64_t headwise_backward(const Problem *);
// Adds the row statistics of a step over a layer's paged keys to the sums (`pages.hpp`).
EXPORTED int64_t headwise_paged_rows(const PageLayer *, const PageStep *);
// Multiplies and adds in registers alone, as pairs of bfloat16 if requested: the peak of a kernel.
// Returns the number of operations, or 0 where there are no pairs.
EXPORTED int64_t headwise_peak(int64_t rounds, int64_t uses_pairs);
// All fields of a problem, and how many there are.
EXPORTED const Field *headwise_fields(int64_t *count);
// Whether this processor has the instructions that this object is compiled to.
EXPORTED int64_t headwise_runs_here();
// Whether this processor runs the object for a smaller instruction set faster.
EXPORTED int64_t headwise_is_outrun_here();
// The version of this interface and the size of a problem.
EXPORTED int64_t headwise_interface();
}

constexpr int64_t INTERFACE = 8;
