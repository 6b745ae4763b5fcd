// What Python fills in (`_interface.py`, field by field) and what the kernel gives back.
//
// Every field takes eight bytes, so that both sides agree about the layout. A null pointer asks
// for nothing, or says that there is nothing. Steps are counted in elements; the last axis of
// every array is dense. Nothing is checked here: Python has done so.
#pragma once
#include <cstdint>

extern "C" {

struct Problem {
    // Queries [B,H,T,D], keys [B,Hkv,S,D], values [B,Hkv,S,Dv]: steps of text, head, token.
    int64_t kind;               // of their numbers, and of those of the heads: a Kind
    const void *q, *k, *v;
    int64_t q_step[3], k_step[3], v_step[3];
    int64_t B, H, Hkv, T, S, D, Dv;
    int64_t packed;             // 1: for a few queries of each head, on many keys

    // How logits become weights. Query i stands at key i + S - T.
    double scale, softcap;      // softcap 0: none
    int64_t left, right;        // keys visible on each side of a query's own
    const int64_t *key_range;   // [B,2]: the first key of each text, and one past its last
    const int32_t *documents;   // [B,S]: a query sees the keys of its own document
    const uint8_t *mask;        // [B,H,T,S]: 1 = may attend
    int64_t mask_step[3];       // of text, head, query; 0 to broadcast
    const float *bias;          // [B,H,T,S]: added to the logits
    int64_t bias_step[3];
    const float *by_distance;   // [B,H,T+S-1]: added too, at S - 1 + i - j
    int64_t by_distance_step[2];
    const float *sinks;         // [H]

    // What is asked for. Everything but the heads is dense.
    void *heads;                // [B,H,T,Dv]
    int64_t heads_step[3];
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

    // The weights that each key receives from some queries are added to what is there. Not where
    // heads are packed.
    const uint8_t *counted;     // [B,T]
    float *received;            // [B,H,S]

    // Gradients: of what was found (heads, lse and entropy are then read), and of what was given.
    // All but the gradients of heads [B,H,T,Dv] may be null: [B,H,T].
    const void *grad_heads;
    const float *grad_lse, *grad_entropy;
    int64_t grad_heads_step[3];
    float *dq;                  // in float32: of several keys' tasks a sum
    void *dk, *dv;
    int64_t dq_step[3], dk_step[3], dv_step[3];

    int64_t threads;
};

#define EXPORTED __attribute__((visibility("default")))
// How it went. Only of heads that were asked for it is said whether all are finite.
enum Outcome : int64_t { DONE, NO_MEMORY, NOT_FINITE };
EXPORTED int64_t headwise_forward(const Problem *);
EXPORTED int64_t headwise_backward(const Problem *);
// Multiplies and adds in registers alone, in pairs of bfloat16 if asked for: what no kernel exceeds.
// Returns how many operations those were, or 0 where there are no pairs.
EXPORTED int64_t headwise_peak(int64_t rounds, int64_t in_pairs);
// Whether this processor has the instructions that this object is made of.
EXPORTED int64_t headwise_runs_here();
// A number that changes with this file: its version, and the size of a problem.
EXPORTED int64_t headwise_interface();
}

constexpr int64_t INTERFACE = 5;
