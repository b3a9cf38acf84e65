/*
 * Lloyd-Max by fixed-point steps, then Newton.
 *
 * The density of a coordinate is C (1 - t^2)^p with p = (d - 3) / 2. It is symmetric, so only the cells above
 *0 are solved. A centroid is a conditional mean; the textbook closed form of it cancels so much that 8-bit
 * codebooks lose float32 bits. So every cell is integrated by itself, relative to its middle m:
 *
 *	centroid = m + int (t - m) g / int g,   g(t) = ((1 - t^2) / (1 - m^2))^p
 *
 * which keeps all digits, since (t - m) is small and exact. The condition "every centroid is the mean of the
 * cell between its midpoints" links neighbours only, so Newton's system is tridiagonal. A small change of the
 * error is no reason to stop: codebooks found that way are up to 171 % worse at 8 bits.
 */
#include "codebooks/solver.h"

#include <math.h>

#define HALF_CELLS_MAX   128u
#define N_LLOYD_STEPS    30u
#define N_NEWTON_STEPS   12u /* converges in at most 6 */
#define NEWTON_STEP_DONE 1e-13
#define N_START_POINTS   2048u

/* Gauss-Legendre with 24 points on [-1, 1]: positive nodes and their weights, from 50-digit arithmetic. */
static const double gauss[12][2] = {
	{ 0.0640568928626056260850, 0.1279381953467521569740 },
	{ 0.1911188674736163091586, 0.1258374563468282961213 },
	{ 0.3150426796961633743867, 0.1216704729278033912044 },
	{ 0.4337935076260451384870, 0.1155056680537256013533 },
	{ 0.5454214713888395356583, 0.1074442701159656347825 },
	{ 0.6480936519369755692524, 0.0976186521041138882698 },
	{ 0.7401241915785543642438, 0.0861901615319532759171 },
	{ 0.8200019859739029219539, 0.0733464814110803057340 },
	{ 0.8864155270044010342131, 0.0592985849154367807463 },
	{ 0.9382745520027327585236, 0.0442774388174198061686 },
	{ 0.9747285559713094981983, 0.0285313886289336631813 },
	{ 0.9951872199970213601799, 0.0123412297999871995468 },
};

/* g(t): the density relative to that at m. Zero at the ends of the interval unless it is flat. */
static double relative_density(double power, double t, double m)
{
	const double ratio = (m - t) * (m + t) / ((1 - m) * (1 + m));

	return ratio <= -1 ? (power == 0 ? 1 : 0) : exp(power * log1p(ratio));
}

/* Moments of one cell about m, relative to the density at m. */
struct moments {
	double mass;   /* int g */
	double first;  /* int (t - m) g */
	double second; /* int (t - m)^2 g */
};

static void add_panel(double power, double m, double low, double high, struct moments *moments)
{
	const double middle = (low + high) / 2, half = (high - low) / 2;

	for (uint32_t i = 0; i < 24; i++) {
		const double node = i % 2 ? gauss[i / 2][0] : -gauss[i / 2][0];
		const double t = middle + half * node;
		const double mass = half * gauss[i / 2][1] * relative_density(power, t, m);

		moments->mass += mass;
		moments->first += mass * (t - m);
		moments->second += mass * (t - m) * (t - m);
	}
}

/*
 * A cell that ends at 1: panels whose distance to 1 shrinks by one factor. (1 - t)^power changes by no more
 * than e^4 in a panel, which 24 points integrate exactly enough, and where it is a fractional power the
 * panels close in on its singular end. Stops where nothing is left to add.
 */
static void add_last_cell(double power, double m, double low, struct moments *moments)
{
	const double shrink = fmax(exp(-4 / fmax(power, 0.5)), 0.25);
	double rest = 1 - low;

	for (uint32_t n = 0; n < 1000; n++) {
		const double mass_before = moments->mass;

		add_panel(power, m, 1 - rest, 1 - rest * shrink, moments);
		rest *= shrink;
		if (moments->mass - mass_before < 1e-19 * moments->mass)
			return;
	}
}

static struct moments cell_moments(double power, double m, double low, double high)
{
	struct moments moments = { 0 };

	if (high < 1)
		add_panel(power, m, low, high, &moments);
	else if (power == 0)
		add_panel(power, m, low, high, &moments);
	else
		add_last_cell(power, m, low, &moments);
	return moments;
}

/* Lower and upper end of the cell of centroid i; cell 0 begins at 0, the last one ends at 1. */
static double cell_low(const double *centroids, uint32_t i)
{
	return i == 0 ? 0 : (centroids[i - 1] + centroids[i]) / 2;
}

static double cell_high(const double *centroids, uint32_t i, uint32_t n_cells)
{
	return i + 1 == n_cells ? 1 : (centroids[i] + centroids[i + 1]) / 2;
}

/* Where integrals of a cell are taken about: the middle, or the centroid where the cell is long. */
static double cell_middle(const double *centroids, uint32_t i, uint32_t n_cells)
{
	return i + 1 == n_cells ? centroids[i]
				: (cell_low(centroids, i) + cell_high(centroids, i, n_cells)) / 2;
}

/*
 * The best points for many cells have a density like f^(1/3) (Panter and Dite), which is a power of
 * (1 - t^2) again: centroids begin at its quantiles.
 */
static void start(double power, uint32_t n_cells, double *centroids)
{
	double total = 0, sum = 0;
	uint32_t cell_idx = 0;

	for (uint32_t i = 0; i < N_START_POINTS; i++)
		total += relative_density(power / 3, (i + 0.5) / N_START_POINTS, 0);
	for (uint32_t i = 0; i < N_START_POINTS; i++) {
		const double mass = relative_density(power / 3, (i + 0.5) / N_START_POINTS, 0);

		while (cell_idx < n_cells) {
			const double wanted = total * (cell_idx + 0.5) / n_cells;

			if (wanted > sum + mass)
				break;
			centroids[cell_idx++] = (i + (wanted - sum) / mass) / N_START_POINTS;
		}
		sum += mass;
	}
	for (; cell_idx < n_cells; cell_idx++) /* rounding kept the last ones back */
		centroids[cell_idx] = (centroids[cell_idx - 1] + 1) / 2;
}

static void lloyd_step(double power, uint32_t n_cells, double *centroids)
{
	double next[HALF_CELLS_MAX];

	for (uint32_t i = 0; i < n_cells; i++) {
		const double m = cell_middle(centroids, i, n_cells);
		const struct moments moments =
			cell_moments(power, m, cell_low(centroids, i), cell_high(centroids, i, n_cells));

		next[i] = m + moments.first / moments.mass;
	}
	for (uint32_t i = 0; i < n_cells; i++)
		centroids[i] = next[i];
}

/*
 * One Newton step on F_i = c_i - mean of cell i. With h the density at an end over the mass of the cell, the
 * mean moves by h_low (mean - low) and h_high (high - mean) when the ends move, and an end moves by half of
 * each neighbour. Returns the largest step.
 */
static double newton_step(double power, uint32_t n_cells, double *centroids)
{
	double upper[HALF_CELLS_MAX], step[HALF_CELLS_MAX]; /* after elimination */
	double largest = 0;

	for (uint32_t i = 0; i < n_cells; i++) {
		const double low = cell_low(centroids, i), high = cell_high(centroids, i, n_cells);
		const double m = cell_middle(centroids, i, n_cells);
		const struct moments moments = cell_moments(power, m, low, high);
		const double offset = moments.first / moments.mass, mean = m + offset;
		const double slope_low =
			i == 0 ? 0 : relative_density(power, low, m) / moments.mass * (mean - low) / 2;
		const double slope_high = i + 1 == n_cells
			? 0
			: relative_density(power, high, m) / moments.mass * (high - mean) / 2;
		/* (c - m) - offset keeps digits that c - (m + offset) would lose. */
		const double residual = (centroids[i] - m) - offset;
		double pivot = 1 - slope_low - slope_high, value = -residual;

		if (i > 0) {
			pivot += slope_low * upper[i - 1];
			value += slope_low * step[i - 1];
		}
		upper[i] = -slope_high / pivot;
		step[i] = value / pivot;
	}
	for (uint32_t i = n_cells; i-- > 0;) {
		if (i + 1 < n_cells)
			step[i] -= upper[i] * step[i + 1];
	}
	for (uint32_t i = 0; i < n_cells; i++) {
		centroids[i] += step[i];
		largest = fmax(largest, fabs(step[i]));
	}
	return largest;
}

/*
 * C = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)), by Gamma(x + 1) = x Gamma(x): lgamma() of large arguments loses
 * digits. C is 1/2 at d = 3, 2/pi at d = 4.
 */
static double density_factor(uint32_t head_dim)
{
	const bool is_odd = head_dim % 2;
	double factor = is_odd ? 0.5 : 0.63661977236758134308;

	for (uint32_t d = is_odd ? 3 : 4; d < head_dim; d += 2)
		factor *= (double)d / (double)(d - 1);
	return factor;
}

/* Sum over cells of int (t - c)^2 f: unlike 1/d - 2 sum c M it has no cancellation. */
static double error_per_coord(uint32_t head_dim, double power, uint32_t n_cells, const double *centroids)
{
	double sum = 0;

	for (uint32_t i = 0; i < n_cells; i++) {
		const double c = centroids[i];
		const struct moments moments =
			cell_moments(power, c, cell_low(centroids, i), cell_high(centroids, i, n_cells));

		sum += moments.second * exp(power * log1p(-c * c));
	}
	return 2 * density_factor(head_dim) * sum;
}

bool kvcb_solve(uint32_t head_dim, uint32_t bits, struct kvcb_solution *solution)
{
	if (head_dim < KVCB_DIM_MIN || head_dim > KVCB_DIM_MAX || bits < 1 || bits > KVCB_BITS_MAX)
		return false;

	const uint32_t n_cells = 1u << bits >> 1; /* above 0 */
	const double power = ((double)head_dim - 3) / 2;
	double half[HALF_CELLS_MAX];

	start(power, n_cells, half);
	for (uint32_t n = 0; n < N_LLOYD_STEPS; n++)
		lloyd_step(power, n_cells, half);
	for (uint32_t n = 0; n < N_NEWTON_STEPS; n++) {
		if (newton_step(power, n_cells, half) < NEWTON_STEP_DONE)
			break;
	}
	*solution = (struct kvcb_solution){ .head_dim = head_dim, .bits = bits };
	for (uint32_t i = 0; i < n_cells; i++) {
		solution->centroids[n_cells + i] = half[i];
		solution->centroids[n_cells - 1 - i] = -half[i];
		solution->boundaries[n_cells + i] = cell_low(half, i);
		solution->boundaries[n_cells - i] = i == 0 ? 0 : -cell_low(half, i);
	}
	solution->boundaries[0] = -1;
	solution->boundaries[2 * n_cells] = 1;
	solution->mse_per_coord = error_per_coord(head_dim, power, n_cells, half);
	return true;
}

void kvcb_solution_round(const struct kvcb_solution *solution, struct kvcb_codebook *codebook)
{
	const uint32_t n = 1u << solution->bits;

	*codebook = (struct kvcb_codebook){ .head_dim = solution->head_dim,
		.bits = solution->bits,
		.mse_per_coord = solution->mse_per_coord };
	for (uint32_t i = 0; i < n; i++)
		codebook->centroids[i] = (float)solution->centroids[i];
	for (uint32_t i = 0; i + 1 < n; i++)
		codebook->interior_boundaries[i] = (float)solution->boundaries[i + 1];
}

const struct kvcb_codebook *kvcb_get(uint32_t head_dim, uint32_t bits, struct kvcb_codebook *room)
{
	const struct kvcb_codebook *embedded = kvcb_find(head_dim, bits);
	struct kvcb_solution solution;

	if (embedded)
		return embedded;
	if (!kvcb_solve(head_dim, bits, &solution))
		return NULL;
	kvcb_solution_round(&solution, room);
	return room;
}

static void print_list(const char *name, const double *values, uint32_t n_values, FILE *file)
{
	fprintf(file, " \"%s\": [\n", name);
	for (uint32_t i = 0; i < n_values; i++)
		fprintf(file, "  %.17g%s\n", values[i], i + 1 < n_values ? "," : "");
	fprintf(file, " ],\n");
}

bool kvcb_solution_print(const struct kvcb_solution *solution, FILE *file)
{
	const uint32_t n = 1u << solution->bits;

	fprintf(file, "{\n \"d\": %u,\n \"bits\": %u,\n", solution->head_dim, solution->bits);
	print_list("centroids", solution->centroids, n, file);
	print_list("boundaries", solution->boundaries, n + 1, file);
	fprintf(file, " \"mse_per_coord\": %.17g,\n \"mse_total\": %.17g\n}\n", solution->mse_per_coord,
		solution->head_dim * solution->mse_per_coord);
	return !ferror(file);
}
