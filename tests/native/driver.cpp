// A few problems of all kinds for the native kernel, without Python: what it gives is printed, a
// number to a line, so that builds for other processors can be compared.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "interface.h"

namespace {

uint32_t state = 1;
float draw() {  // between -1 and 1, the same everywhere
    state = state * 1664525 + 1013904223;
    return (int32_t(state >> 8) - (1 << 23)) / float(1 << 23);
}
std::vector<float> drawn(int64_t n) {
    std::vector<float> x(n);
    for (float &one : x) one = draw();
    return x;
}

// Inputs as the kernel reads them: float32, bfloat16, or float16 (of numbers that it holds exactly).
std::vector<uint8_t> stored(int64_t n, int64_t kind) {
    std::vector<uint8_t> bytes(n * (kind == 0 ? 4 : 2));
    for (int64_t i = 0; i < n; i++) {
        float x = draw();
        uint32_t bits;
        memcpy(&bits, &x, 4);
        uint16_t upper = bits >> 16, half = (bits >> 16 & 0x8000) | (0x3000 + (bits >> 9 & 0xbff));
        if (kind == 0) memcpy(&bytes[4 * i], &x, 4);
        else memcpy(&bytes[2 * i], kind == 1 ? &upper : &half, 2);
    }
    return bytes;
}

void print(const char *name, const std::vector<float> &found) {
    for (float x : found) printf("%s %.7g\n", name, x);
}
void print_stored(const std::vector<uint8_t> &found, int64_t kind) {
    const char *names[] = {"float", "bfloat16", "half"};
    for (size_t i = 0; i < found.size(); i += kind == 0 ? 4 : 2) {
        float x = 0;
        uint16_t bits;
        if (kind == 0) memcpy(&x, &found[i], 4);
        else memcpy(&bits, &found[i], 2);
        if (kind == 1) memcpy(reinterpret_cast<char *>(&x) + 2, &bits, 2);
        if (kind == 2) {
            int power = bits >> 10 & 31, digits = (bits & 1023) | (power ? 1024 : 0);
            x = std::ldexp(bits >> 15 ? -digits : digits, (power ? power : 1) - 25);
        }
        printf("%s %.7g\n", names[kind], x);
    }
}

struct Sizes {
    int64_t B, H, Hkv, T, S, D, Dv;
};

int64_t solve(Sizes n, int64_t kind, bool packed, bool causal) {
    int64_t rows = n.B * n.H * n.T, N = 2, C = 2;
    auto q = stored(rows * n.D, kind), k = stored(n.B * n.Hkv * n.S * n.D, kind);
    auto v = stored(n.B * n.Hkv * n.S * n.Dv, kind);
    auto bias = drawn(rows * n.S), sinks = drawn(n.H), norms = drawn(n.B * n.H * n.S);
    auto query_at = drawn(n.B * n.T), key_at = drawn(n.B * n.S);
    std::vector<uint8_t> mask(rows * n.S), heads(rows * n.Dv * (kind == 0 ? 4 : 2));
    std::vector<uint8_t> seen(rows * N), counted(n.B * n.T, 1);
    for (uint8_t &one : mask) one = draw() < 0.6f;
    std::vector<int32_t> keys(n.B * n.T * N);
    for (int32_t &one : keys) one = (draw() + 1) / 2 * n.S;
    std::vector<int64_t> n_keys(rows), argmax(rows);
    for (float &one : norms) one = one < 0 ? -one : one;  // lengths: their sums do not vanish
    auto classes = drawn(n.B * n.S * C);
    for (int64_t i = 0; i < n.B * n.S; i++) classes[i * C + i % C] = 0;
    constexpr int STATISTICS = 8;
    std::vector<float> row[STATISTICS], key_mass(rows * N), key_top(rows * N), key_share(rows * N);
    for (auto &one : row) one.resize(rows);
    std::vector<float> mass(rows * C), top(rows * C), share(rows * C), members(rows * C);
    std::vector<float> received(n.B * n.H * n.S);

    Problem p = {};
    p.dtype = kind;
    p.B = n.B, p.H = n.H, p.Hkv = n.Hkv, p.T = n.T, p.S = n.S, p.D = n.D, p.Dv = n.Dv;
    p.packed = packed;
    p.q = q.data(), p.k = k.data(), p.v = v.data(), p.heads = heads.data();
    auto step = [](int64_t *to, int64_t heads, int64_t tokens, int64_t width) {
        to[0] = heads * tokens * width, to[1] = tokens * width, to[2] = width;
    };
    step(p.q_stride, n.H, n.T, n.D), step(p.k_stride, n.Hkv, n.S, n.D);
    step(p.v_stride, n.Hkv, n.S, n.Dv), step(p.heads_stride, n.H, n.T, n.Dv);
    p.scale = 3, p.softcap = causal ? 0 : 2, p.sinks = sinks.data(), p.threads = 2;
    p.left = causal ? n.S - 3 : int64_t(1) << 40, p.right = causal ? 0 : int64_t(1) << 40;
    if (!causal) {
        p.mask = mask.data(), p.bias = bias.data();
        step(p.mask_stride, n.H, n.T, n.S), step(p.bias_stride, n.H, n.T, n.S);
    }
    p.n_keys = n_keys.data(), p.argmax = argmax.data();
    float **asked[STATISTICS] = {&p.lse, &p.max_logit, &p.max_weight, &p.entropy, &p.sink,
                                 &p.participation, &p.distance, &p.even_distance};
    for (int i = 0; i < STATISTICS; i++) *asked[i] = row[i].data();
    p.query_at = query_at.data(), p.key_at = key_at.data(), p.key_norms = norms.data();
    p.N = N, p.keys = keys.data(), p.key_mass = key_mass.data(), p.key_top = key_top.data();
    p.key_share = key_share.data(), p.key_seen = seen.data();
    p.C = C, p.classes = classes.data(), p.class_mass = mass.data(), p.class_top = top.data();
    p.class_share = share.data(), p.class_keys = members.data();
    p.counted = counted.data();
    if (!packed) p.received = received.data();
    if (headwise_forward(&p) == NO_MEMORY) return 1;

    for (int64_t i = 0; i < rows; i++) printf("key %d %d\n", int(n_keys[i]), int(argmax[i]));
    for (int i = 0; i < STATISTICS; i++) print("row", row[i]);
    for (const auto *one : {&key_mass, &key_top, &key_share}) print("single", *one);
    for (const auto *one : {&mass, &top, &share, &members}) print("class", *one);
    print("received", received);
    print_stored(heads, kind);
    if (packed) return 0;

    auto back = stored(rows * n.Dv, kind);
    auto back_lse = drawn(rows), back_entropy = drawn(rows);
    std::vector<float> dq(rows * n.D);
    std::vector<uint8_t> dk(k.size()), dv(v.size());
    p.grad_heads = back.data(), p.grad_lse = back_lse.data(), p.grad_entropy = back_entropy.data();
    p.dq = dq.data(), p.dk = dk.data(), p.dv = dv.data();
    step(p.grad_heads_stride, n.H, n.T, n.Dv), step(p.dq_stride, n.H, n.T, n.D);
    step(p.dk_stride, n.Hkv, n.S, n.D), step(p.dv_stride, n.Hkv, n.S, n.Dv);
    if (headwise_backward(&p)) return 1;
    print("query", dq);
    print_stored(dk, kind), print_stored(dv, kind);
    return 0;
}

// Three queries on two pages, and one on one, of two kv heads.
int64_t solve_pages(int64_t kind, int64_t layout) {
    constexpr int64_t H = 6, Hkv = 2, D = 34, page = 64, columns = 12;
    auto q = stored(4 * H * D, kind), keys = stored(3 * Hkv * page * D, kind);
    const int32_t table[] = {2, 0, 1, 0};
    const int64_t rows[] = {0, 0, 1, 64, 2, 99, 3, 41};
    PageSums sums[2][H * columns] = {};
    for (auto &of_group : sums)
        for (PageSums &column : of_group) column.maximum = NAN;
    const PageGroup groups[] = {{0, 3, 0, sums[0], {{0, 9}, {30, 70}, {0, 0}, {5, 6}}},
                                {3, 4, 1, sums[1], {{3, 4}, {0, 90}, {0, 0}, {0, 0}}}};
    PageLayer layer = {kind, layout, 0, H, Hkv, D, page, kind ? 0 : 50, .4, kind ? 0. : 3.,
                       keys.data(), {Hkv * page * D, page * D}};
    PageStep step = {2, 2, groups, rows, q.data(), {H * D, D}, table, 2};
    if (headwise_paged_rows(&layer, &step)) return 1;
    for (const auto &of_group : sums)
        for (const PageSums &column : of_group)
            for (double sum : {column.total, column.count, column.even, column.maximum})
                print("page", {float(sum)});
    return 0;
}

}  // namespace

int main() {
    if (!headwise_runs_here()) return 2;
    if (solve_pages(0, 0) || solve_pages(1, 0) || solve_pages(1, 1)) return 1;
    for (int64_t kind = 0; kind < 3; kind++)
        for (bool causal : {true, false}) {
            if (solve({2, 4, 2, 37, 131, 13, 19}, kind, false, causal)) return 1;
            if (solve({1, 2, 1, 101, 70, 12, 18}, kind, false, causal)) return 1;
            if (solve({2, 6, 2, 1, 301, 13, 19}, kind, true, causal)) return 1;
            if (solve({1, 5, 1, 6, 70, 34, 40}, kind, true, causal)) return 1;
        }
}
