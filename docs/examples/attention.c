/* Attention in C, on folders that `refattn cases export DIR --format raw --dtype float32` made.

       cc -O2 -o attention attention.c -lm && ./attention DIR/0*

   It knows causal, mask, scale, q_start, k_start and grouped heads. FAULT, a number, makes it wrong on purpose:
   1 the mask is one key too wide, 2 causal is aligned top-left, 3 there is no scale, 4 heads are read h % Hkv. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAULT
#define FAULT 0
#endif

static char path[4096], text[65536];

static FILE *open_file(const char *folder, const char *name, const char *mode) {
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, mode);
    if (!file) perror(path), exit(1);
    return file;
}

/* The numbers after "key": in case.json, which has one key a line; how many there are, 0 for null. */
static int numbers(const char *key, double *found, int most) {
    char quoted[64];
    int count = 0;
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *at = strstr(text, quoted) + strlen(quoted);
    for (at += *at == '['; count < most; at += strspn(at, ", ")) {
        char *end;
        double number = strtod(at, &end);
        if (end == at) break;
        found[count++] = number;
        at = end;
    }
    return count;
}

static double number(const char *key, double otherwise, long entry) {
    double found[64];
    int count = numbers(key, found, 64);
    return count == 0 ? otherwise : found[count == 1 ? 0 : entry];
}

static void *tensor(const char *folder, const char *name, size_t size) {
    void *data = malloc(size + 1);
    FILE *file = open_file(folder, name, "rb");
    if (fread(data, 1, size, file) != size) fprintf(stderr, "%s is too short\n", path), exit(1);
    fclose(file);
    return data;
}

static void attend(const char *folder) {
    double q4[4], k4[4], v4[4], unused[4];
    FILE *file = open_file(folder, "case.json", "rb");
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    numbers("q", q4, 4), numbers("k", k4, 4), numbers("v", v4, 4);
    long batch = q4[0], heads = q4[1], q_len = q4[2], d_k = q4[3], kv_heads = k4[1], k_len = k4[2], d_v = v4[3];
    size_t rows = (size_t)batch * heads * q_len, keys = (size_t)batch * kv_heads * k_len;
    float *q = tensor(folder, "q.bin", rows * d_k * sizeof *q);
    float *k = tensor(folder, "k.bin", keys * d_k * sizeof *k);
    float *v = tensor(folder, "v.bin", keys * d_v * sizeof *v);
    unsigned char *mask = numbers("mask", unused, 4) ? tensor(folder, "mask.bin", rows * k_len) : NULL;
    int causal = strstr(text, "\"causal\": true") != NULL;
    float scale = number("scale", d_k ? 1 / sqrt(d_k) : 1, 0);
    float *output = calloc(rows * d_v + 1, sizeof *output), *logits = malloc((k_len + 1) * sizeof *logits);
    char *visible = malloc(k_len + 1);

    for (size_t row = 0; row < rows; row++) {
        long b = row / (heads * q_len), h = row / q_len % heads, i = row % q_len;
        long kv_head = FAULT == 4 ? h % kv_heads : h / (heads / kv_heads);
        const float *k_head = k + (b * kv_heads + kv_head) * k_len * d_k;
        const float *v_head = v + (b * kv_heads + kv_head) * k_len * d_v;
        double q_start = FAULT == 2 ? 0 : number("q_start", 0, b), k_start = number("k_start", 0, b);
        float largest = -INFINITY, sum = 0;
        for (long j = 0; j < k_len; j++) {
            float score = 0;
            visible[j] = !causal || k_start + j <= q_start + i;
            if (mask) visible[j] &= mask[row * k_len + j] || (FAULT == 1 && j + 1 < k_len && mask[row * k_len + j + 1]);
            for (long d = 0; d < d_k; d++) {
                float key = k_head[j * d_k + d];
                score += isfinite(key) ? q[row * d_k + d] * key : NAN;
            }
            logits[j] = FAULT == 3 ? score : score * scale;
            if (visible[j] && logits[j] > largest) largest = logits[j];
        }
        for (long j = 0; j < k_len; j++) {
            if (!visible[j]) continue; /* what is hidden influences nothing, not even as NaN */
            float weight = expf(logits[j] - largest);
            sum += weight;
            for (long d = 0; d < d_v; d++) output[row * d_v + d] += weight * v_head[j * d_v + d];
        }
        for (long d = 0; sum != 0 && d < d_v; d++) output[row * d_v + d] /= sum; /* a row that sees no key is 0 */
    }
    file = open_file(folder, "output.bin", "wb");
    if (fwrite(output, sizeof *output, rows * d_v, file) != rows * d_v) perror(path), exit(1);
    fclose(file);
    free(q), free(k), free(v), free(mask), free(output), free(logits), free(visible);
}

int main(int count, char **folders) {
    for (int at = 1; at < count; at++) attend(folders[at]);
    return 0;
}
