/*
 * Householder QR. Arrays are kept by columns, so that every inner loop runs along memory. Sums are in order
 * of index: the same bits for every compiler. Another order (a blocked LAPACK) differs by some 1e-15 and
 * changes a float32 entry only where it lies that close to the middle between two float32.
 */
#include "core/rotation_qr.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "core/memory.h"
#include "core/mt19937.h"

struct qr {
	uint32_t n;
	double *a;       /* columns: R on and above the diagonal, the reflectors' vectors below */
	double *q;       /* columns */
	double *tau;     /* of each reflector I - tau v v^T; 0: none */
	double *r_diag;  /* R_jj */
	double *normals; /* row-major */
};

static double dot(const double *a, const double *b, uint32_t n)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += a[i] * b[i];
	return sum;
}

/* column -= tau (v . column) v, where v_0 = 1 is not stored: v holds v_1 and on. */
static void reflect(double tau, const double *v, uint32_t n_rest, double *column)
{
	const double weight = tau * (column[0] + dot(v, column + 1, n_rest));

	column[0] -= weight;
	for (uint32_t i = 0; i < n_rest; i++)
		column[1 + i] -= weight * v[i];
}

static void factorise(struct qr *qr)
{
	const uint32_t n = qr->n;

	for (uint32_t k = 0; k < n; k++) {
		double *column = qr->a + (size_t)k * n + k;
		const uint32_t n_rest = n - k - 1;
		const double alpha = column[0], rest_sq = dot(column + 1, column + 1, n_rest);

		qr->tau[k] = 0;
		qr->r_diag[k] = alpha;
		if (rest_sq == 0)
			continue;

		const double length = sqrt(alpha * alpha + rest_sq);
		const double beta = alpha >= 0 ? -length : length; /* no cancellation in alpha - beta */

		qr->tau[k] = (beta - alpha) / beta;
		qr->r_diag[k] = beta;
		for (uint32_t i = 0; i < n_rest; i++)
			column[1 + i] /= alpha - beta;
		for (uint32_t j = k + 1; j < n; j++)
			reflect(qr->tau[k], column + 1, n_rest, qr->a + (size_t)j * n + k);
	}
}

/* Q = H_0 H_1 .. H_(n-1), applied to the unit matrix from the last one on. */
static void form_q(struct qr *qr)
{
	const uint32_t n = qr->n;

	for (uint32_t j = 0; j < n; j++)
		qr->q[(size_t)j * n + j] = 1; /* the array came zeroed */
	for (uint32_t k = n; k-- > 0;) {
		if (qr->tau[k] == 0)
			continue;
		for (uint32_t j = k; j < n; j++)
			reflect(qr->tau[k], qr->a + (size_t)k * n + k + 1, n - k - 1,
				qr->q + (size_t)j * n + k);
	}
}

/* Column j times the sign of R_jj; then column 0 once more if the determinant is negative. */
static void store(const struct qr *qr, float *matrix)
{
	const uint32_t n = qr->n;
	bool is_det_negative = false;

	for (uint32_t j = 0; j < n; j++)
		is_det_negative ^= (qr->tau[j] != 0) ^ (qr->r_diag[j] < 0); /* a reflector's is -1 */
	for (uint32_t j = 0; j < n; j++) {
		const bool is_negated = (qr->r_diag[j] < 0) ^ (j == 0 && is_det_negative);

		for (uint32_t i = 0; i < n; i++) {
			const double entry = qr->q[(size_t)j * n + i];

			matrix[(size_t)i * n + j] = (float)(is_negated ? -entry : entry);
		}
	}
}

enum kv_status kv_rotation_qr_fill(uint32_t head_dim, uint32_t seed, float *matrix)
{
	const uint32_t n = head_dim;
	const size_t n_entries = (size_t)n * n;
	struct kv_mt19937 generator;
	struct qr qr = {
		.n = n,
		.a = kv_alloc(n_entries, sizeof(double)),
		.q = kv_alloc(n_entries, sizeof(double)),
		.normals = kv_alloc(n_entries, sizeof(double)),
		.tau = kv_alloc(n, sizeof(double)),
		.r_diag = kv_alloc(n, sizeof(double)),
	};
	const bool is_ready = qr.a && qr.q && qr.normals && qr.tau && qr.r_diag;

	if (is_ready) {
		kv_mt19937_init(&generator, seed);
		kv_mt19937_normals(&generator, n_entries, qr.normals);
		for (uint32_t i = 0; i < n; i++) {
			for (uint32_t j = 0; j < n; j++)
				qr.a[(size_t)j * n + i] = qr.normals[(size_t)i * n + j];
		}
		factorise(&qr);
		form_q(&qr);
		store(&qr, matrix);
	}
	kv_free(qr.a);
	kv_free(qr.q);
	kv_free(qr.normals);
	kv_free(qr.tau);
	kv_free(qr.r_diag);
	return is_ready ? KV_OK : KV_NO_MEMORY;
}
