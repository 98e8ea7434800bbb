/* net.h: a network of integers, written by shok_nb. */
#ifndef NET_H
#define NET_H
#include <stdint.h>
#define NET_INPUTS 2
#define NET_OUTPUTS 1
/* An input q stands for q * 2**-NET_INPUT_POINT. */
#define NET_INPUT_POINT 7
/* An output stands for itself times 2**-point, of all or of its channel. */
static const int8_t net_output_point[1] = {
    16,
};

/* v / 2**shift to the nearest integer, ties to even; shift is 1 or more. */
static inline int32_t net_round(int32_t v, int shift)
{
    uint32_t m = v < 0 ? 0u - (uint32_t)v : (uint32_t)v, q, rest, half;
    if (shift > 31) return 0;
    q = m >> shift;
    rest = m - (q << shift);
    half = (uint32_t)1 << (shift - 1);
    if (rest > half || (rest == half && (q & 1u))) q++;
    return v < 0 ? -(int32_t)q : (int32_t)q;
}

/* The 24 bits that a float32 keeps of a sum. */
static inline int32_t net_single(int32_t v)
{
    uint32_t m = v < 0 ? 0u - (uint32_t)v : (uint32_t)v;
    int shift = 0;
    while (m >> shift > 0xFFFFFFu) shift++;
    return shift ? net_round(v, shift) * ((int32_t)1 << shift) : v;
}

/* A sum on the grid of what comes next. */
static inline int32_t net_leave(int32_t v, int shift, int32_t low, int32_t high)
{
    int64_t n = shift > 0 ? net_round(v, shift) : v * ((int64_t)1 << -shift);
    return n < low ? low : n > high ? high : (int32_t)n;
}

/* Floats as integers: to the nearest, ties to even. Not for nan. */
static inline void net_quantize(const float *x, int8_t *q)
{
    for (int i = 0; i < 2; i++) {
        float v = x[i] * 128.0f, rest;
        int32_t n;
        if (v <= -128.f) { q[i] = -128; continue; }
        if (v >= 127.f) { q[i] = 127; continue; }
        n = (int32_t)v;
        rest = v - (float)n;
        if (rest > .5f || (rest == .5f && n % 2 != 0)) n++;
        if (rest < -.5f || (rest == -.5f && n % 2 != 0)) n--;
        q[i] = (int8_t)n;
    }
}

static const int8_t net_0_weight[2] = {
    -18, -116,
};
static const int32_t net_0_bias[1] = {
    37211,
};
static inline void net_0(const int8_t *x, int32_t *y)
{
    for (int o = 0; o < 1; o++) {
        int32_t s = net_0_bias[o];
        for (int i = 0; i < 2; i++) s += (int32_t)net_0_weight[o*2 + i] * x[i];
        y[o] = (int32_t)s;
    }
}

static inline void net(const int8_t *x, int32_t *y)
{
    net_0(x, y);
}
#endif /* NET_H */
