/*
 * Writes the codebook files: codebook_d{d}_b{b}.json for every bit width of the common head dimensions, or of
 * those that are named. usage: make_codebooks OUT_DIR [DIM ...]
 */
#include <stdlib.h>
#include <string.h>

#include "codebooks/solver.h"

static const uint32_t common_dims[] = { 64, 80, 96, 128, 192, 256 };
#define N_COMMON_DIMS (sizeof(common_dims) / sizeof(common_dims[0]))

static bool write_codebook(const char *out_dir, uint32_t head_dim, uint32_t bits)
{
	struct kvcb_solution solution;
	char path[4096];
	const int n = snprintf(path, sizeof(path), "%s/codebook_d%u_b%u.json", out_dir, head_dim, bits);

	if (n < 0 || (size_t)n >= sizeof(path)) {
		fprintf(stderr, "make_codebooks: the path of %s is too long\n", out_dir);
		return false;
	}
	if (!kvcb_solve(head_dim, bits, &solution)) {
		fprintf(stderr, "make_codebooks: dim %u is not from %u to %u\n", head_dim, KVCB_DIM_MIN,
			KVCB_DIM_MAX);
		return false;
	}

	FILE *file = fopen(path, "w");

	if (!file) {
		perror(path);
		return false;
	}

	const bool is_printed = kvcb_solution_print(&solution, file);

	if (fclose(file) != 0 || !is_printed) {
		perror(path);
		return false;
	}
	return true;
}

int main(int argc, char **argv)
{
	if (argc < 2 || argv[1][0] == '-') {
		fprintf(stderr, "usage: make_codebooks OUT_DIR [DIM ...]\n");
		return 2;
	}

	const size_t n_dims = argc > 2 ? (size_t)argc - 2 : N_COMMON_DIMS;

	for (size_t i = 0; i < n_dims; i++) {
		const uint32_t dim = argc > 2 ? (uint32_t)strtoul(argv[i + 2], NULL, 10) : common_dims[i];

		for (uint32_t bits = 1; bits <= KVCB_BITS_MAX; bits++) {
			if (!write_codebook(argv[1], dim, bits))
				return EXIT_FAILURE;
		}
	}
	return EXIT_SUCCESS;
}
