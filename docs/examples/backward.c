/* The backward pass of attention in C, on folders that `refattn cases export DIR --gradients --dtype float32` made.

       cc -O2 -o backward backward.c -lm && ./backward DIR/0*

   It knows causal, mask, scale, q_start, k_start and grouped heads, and reads files as attention.c does. With -DFAULT=1
   it forgets what the softmax takes away from each row. */
#define main forward
#include "attention.c"
#undef main

static void write_tensor(const char *folder, const char *name, const double *x, size_t size) {
    FILE *file = open_file(folder, name, "wb");
    for (size_t at = 0; at < size; at++) {
        float rounded = (float)x[at];
        if (fwrite(&rounded, sizeof rounded, 1, file) != 1) perror(path), exit(1);
    }
    fclose(file);
}

static void differentiate(const char *folder) {
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
    float *gradient = tensor(folder, "grad_output.bin", rows * d_v * sizeof *gradient);
    unsigned char *mask = numbers("mask", unused, 4) ? tensor(folder, "mask.bin", rows * k_len) : NULL;
    int causal = strstr(text, "\"causal\": true") != NULL;
    double scale = number("scale", d_k ? 1 / sqrt(d_k) : 1, 0);
    double *weights = malloc((k_len + 1) * sizeof *weights), *products = malloc((k_len + 1) * sizeof *products);
    double *grad_q = calloc(rows * d_k + 1, sizeof *grad_q), *grad_k = calloc(keys * d_k + 1, sizeof *grad_k);
    double *grad_v = calloc(keys * d_v + 1, sizeof *grad_v);

    for (size_t row = 0; row < rows; row++) {
        long b = row / (heads * q_len), h = row / q_len % heads, i = row % q_len;
        size_t first = (size_t)(b * kv_heads + h / (heads / kv_heads)) * k_len;
        double q_start = number("q_start", 0, b), k_start = number("k_start", 0, b);
        double largest = -INFINITY, sum = 0, row_sum = 0;
        for (long j = 0; j < k_len; j++) {
            int visible = (!causal || k_start + j <= q_start + i) && (!mask || mask[row * k_len + j]);
            weights[j] = visible ? 0 : -INFINITY;
            for (long d = 0; visible && d < d_k; d++) weights[j] += scale * q[row * d_k + d] * k[(first + j) * d_k + d];
            if (weights[j] > largest) largest = weights[j];
        }
        if (largest == -INFINITY) continue; /* a row that sees no key adds nothing */
        for (long j = 0; j < k_len; j++) sum += weights[j] = exp(weights[j] - largest);
        for (long j = 0; j < k_len; j++) {
            weights[j] /= sum, products[j] = 0;
            if (weights[j] == 0) continue; /* nor does a hidden pair, whatever it holds */
            for (long d = 0; d < d_v; d++) {
                products[j] += (double)gradient[row * d_v + d] * v[(first + j) * d_v + d];
                grad_v[(first + j) * d_v + d] += weights[j] * gradient[row * d_v + d];
            }
            row_sum += weights[j] * products[j];
        }
        for (long j = 0; j < k_len; j++) {
            double score = weights[j] == 0 ? 0 : scale * weights[j] * (products[j] - (FAULT == 1 ? 0 : row_sum));
            for (long d = 0; score != 0 && d < d_k; d++) {
                grad_q[row * d_k + d] += score * k[(first + j) * d_k + d];
                grad_k[(first + j) * d_k + d] += score * q[row * d_k + d];
            }
        }
    }
    write_tensor(folder, "grad_q.bin", grad_q, rows * d_k);
    write_tensor(folder, "grad_k.bin", grad_k, keys * d_k);
    write_tensor(folder, "grad_v.bin", grad_v, keys * d_v);
    free(q), free(k), free(v), free(gradient), free(mask), free(weights), free(products);
    free(grad_q), free(grad_k), free(grad_v);
}

int main(int count, char **folders) {
    for (int at = 1; at < count; at++) differentiate(folders[at]);
    return 0;
}
