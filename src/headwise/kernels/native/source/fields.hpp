// The fields of a problem by name, for Python to compare with its own structure.
#pragma once
#include <cstddef>

#include "interface.h"

#define FIELD(name) {#name, offsetof(Problem, name), sizeof(Problem::name)}
constexpr Field FIELDS[] = {
    FIELD(dtype), FIELD(q), FIELD(k), FIELD(v), FIELD(q_stride), FIELD(k_stride),
    FIELD(v_stride), FIELD(B), FIELD(H), FIELD(Hkv), FIELD(T), FIELD(S), FIELD(D),
    FIELD(Dv), FIELD(packed), FIELD(scale), FIELD(softcap), FIELD(left), FIELD(right),
    FIELD(key_range), FIELD(documents), FIELD(mask), FIELD(mask_stride), FIELD(bias),
    FIELD(bias_stride), FIELD(by_distance), FIELD(by_distance_stride), FIELD(sinks),
    FIELD(heads), FIELD(heads_stride), FIELD(n_keys), FIELD(argmax), FIELD(lse),
    FIELD(max_logit), FIELD(max_weight), FIELD(entropy), FIELD(participation), FIELD(sink),
    FIELD(distance), FIELD(even_distance), FIELD(query_at), FIELD(key_at), FIELD(N),
    FIELD(keys), FIELD(key_mass), FIELD(key_top), FIELD(key_share), FIELD(key_seen),
    FIELD(C), FIELD(classes), FIELD(class_mass), FIELD(class_top), FIELD(class_share),
    FIELD(class_keys), FIELD(key_norms), FIELD(counted), FIELD(received), FIELD(grad_heads),
    FIELD(grad_lse), FIELD(grad_entropy), FIELD(grad_heads_stride), FIELD(dq), FIELD(dk),
    FIELD(dv), FIELD(dq_stride), FIELD(dk_stride), FIELD(dv_stride), FIELD(threads)};
#undef FIELD
// A field that is missing from the list leaves a gap.
static_assert([] {
    size_t end = 0;
    for (const Field &field : FIELDS) {
        if (field.offset != int64_t(end)) return false;
        end += field.size;
    }
    return end == sizeof(Problem);
}());
